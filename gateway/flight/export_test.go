package flight

import (
	"context"
	"io"
	"net"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/stats"
)

// recorded is a stream of messages that have come already.
type recorded struct {
	arrowflight.FlightService_DoPutServer
	messages []*arrowflight.FlightData
}

func (r *recorded) Recv() (*arrowflight.FlightData, error) {
	if len(r.messages) == 0 {
		return nil, io.EOF
	}
	m := r.messages[0]
	r.messages = r.messages[1:]
	return m, nil
}

// Decode is what DoPut makes of the messages of a stream.
func Decode(messages []*arrowflight.FlightData) (keys, values [][]byte, err error) {
	r, err := arrowflight.NewRecordReader(&incoming{FlightService_DoPutServer: &recorded{messages: messages}})
	if err != nil {
		return nil, nil, err
	}
	defer r.Release()
	at, err := columnsToPut(r.Schema())
	if err != nil {
		return nil, nil, err
	}
	for r.Next() {
		if err := checkRows(r.RecordBatch(), at); err != nil {
			return nil, nil, err
		}
		e, err := entriesOf(r.RecordBatch(), at)
		if err != nil {
			return nil, nil, err
		}
		for _, row := range e.order {
			keys, values = append(keys, e.keys(row)), append(values, e.values(row))
		}
	}
	return keys, values, r.Err()
}

// TurnWithoutMemory is what a reader does between two batches while other streams have all the memory.
func (s *Server) TurnWithoutMemory(ctx context.Context) (more bool, err error) {
	if err := s.memory.take(ctx, s.memory.size); err != nil {
		return false, err
	}
	defer s.memory.give(s.memory.size)
	r := reader{s: s, b: newBuilder([]string{KeyColumn}, s.cfg.BatchBytes, &s.parcels)}
	return r.turn(ctx)
}

// OpenTicket is how DoGet reads a ticket of a caller without a token and a tenant.
func OpenTicket(sealed []byte) error {
	_, err := openTicket(sealed, principal{}, time.Unix(0, 0))
	return err
}

// SealAs makes bytes a ticket of a caller without a token.
func SealAs(b []byte) []byte { return append(principal{}.mac(b), b...) }

// ParseCommand is how a command is read: it is refused, or a range and columns that a scan takes.
func ParseCommand(cmd []byte) (from, to []byte, columns []string, err error) {
	s, err := requestOf(&arrowflight.FlightDescriptor{Type: arrowflight.DescriptorCMD, Cmd: cmd})
	return s.from, s.to, s.columns, err
}

// Tally counts the puts that are not done, and those whose outcome is unknown.
func Tally(errs []error) (not, unknown int, err error) {
	o := tally(errs)
	return o.not, o.unknown, o.err
}

// CodeOf is the code of an error.
func CodeOf(err error) codes.Code { return codeOf(err) }

// MaxStrangers is how many calls with tokens that are not known yet run at a time.
const MaxStrangers = maxStrangers

// MaxShort is how many calls run at a time that are no streams of batches.
const MaxShort = maxShort

// Strangers is how many calls of strangers run.
func Strangers(s *Server) int { return int(s.calls.strangers.Load()) }

// ShortCalls is how many calls run that are no streams of batches, and of how many tokens.
func ShortCalls(s *Server) (calls, tokens int) {
	s.calls.mu.Lock()
	defer s.calls.mu.Unlock()
	return s.calls.short, len(s.calls.of)
}

// Forget has sessions that no call uses end now, and new calls open others.
func Forget(s *Server) {
	s.callers.mu.Lock()
	defer s.callers.mu.Unlock()
	for _, c := range s.callers.known {
		s.callers.retire(c)
	}
}

// PutsOf is how many DoPut run, with those that wait for a schema.
func PutsOf(s *Server) (n int) {
	s.callers.mu.Lock()
	defer s.callers.mu.Unlock()
	for _, of := range s.callers.puts {
		n += of
	}
	return n
}

// Age makes all sessions old.
func Age(s *Server) {
	s.callers.mu.Lock()
	defer s.callers.mu.Unlock()
	for _, c := range s.callers.known {
		c.opened = time.Time{}
	}
}

// MaxPutRows of a batch.
const MaxPutRows = maxPutRows

// Order sorts a batch as DoPut does, and says how many rows it has.
func Order(b arrow.RecordBatch) (int, error) {
	e, err := entriesOf(b, positions{0, 1})
	return len(e.order), err
}

// Outgoing is a message of a stream that is not written.
type Outgoing struct {
	o      *outgoing
	before *outgoing
	a      *admitted
}

// sink is a stream that takes any message, and tells so as gRPC's does.
type sink struct {
	grpc.ServerStream
	taking func()
}

func (s sink) SendMsg(m any) error {
	s.taking()
	taken{}.HandleRPC(context.Background(), &stats.OutPayload{Payload: m})
	return nil
}

// NewOutgoing makes a message for a call whose connection is open, which waits behind one that is not written. taking is
// called while it is sent.
func NewOutgoing(ctx context.Context, s *Server, nc net.Conn, message any, taking func()) *Outgoing {
	ctx = peer.NewContext(ctx, &peer.Peer{AuthInfo: peerInfo{conn: newConnections(1, &s.stats.refused).add(nc)}})
	o := &Outgoing{o: s.outgoing(ctx, message, nil)}
	o.a = &admitted{ServerStream: sink{taking: taking}, s: s, ctx: ctx, last: s.outgoing(ctx, message, nil)}
	o.before = o.a.last
	return o
}

// Follow has the message before end, written or not.
func (o *Outgoing) Follow(sent bool) { o.before.end(sent) }

// Send sends the message when the one before is written.
func (o *Outgoing) Send() error { return o.a.SendMsg(o.o) }

// Marshal is what gRPC does with a message that it sends.
func (o *Outgoing) Marshal() error {
	_, err := newCodec().Marshal(o.o)
	return err
}

// Ended says whether the message has ended.
func (o *Outgoing) Ended() bool {
	select {
	case <-o.o.ended:
		return true
	default:
		return false
	}
}

// Timed says whether the time that the caller has for the message runs.
func (o *Outgoing) Timed() bool {
	o.o.mu.Lock()
	defer o.o.mu.Unlock()
	return o.o.late != nil
}

// Linked says whether the connection holds the message in memory. It does not from here on.
func (o *Outgoing) Linked() bool {
	o.o.mu.Lock()
	defer o.o.mu.Unlock()
	return o.o.unlink != nil && o.o.unlink()
}

// AllocationsOfBatch is how often a stream allocates that fills one more batch of so many bytes, in the buffers of one that was written.
func AllocationsOfBatch(batch int) float64 {
	b, entry := newBuilder([]string{KeyColumn, ValueColumn, VersionColumn}, batch, &parcels{}), make([]byte, 1000)
	return testing.AllocsPerRun(3, func() {
		b.parcel.clear(batch)
		for b.bytes+b.size(entry[:10], entry) <= batch {
			b.add(entry[:10], entry, 1)
		}
	})
}

// AllocationsOfMessage is how often a stream allocates for a batch of so many bytes, until gRPC has written it.
func AllocationsOfMessage(batch int) float64 {
	b, entry := newBuilder([]string{KeyColumn, ValueColumn, VersionColumn}, batch, &parcels{}), make([]byte, 1000)
	return testing.AllocsPerRun(3, func() {
		b.parcel.clear(batch)
		for b.bytes+b.size(entry[:10], entry) <= batch {
			b.add(entry[:10], entry, 1)
		}
		m, err := batchMessage(b.batch(), b.parcel)
		if err != nil {
			panic(err)
		}
		m.buffers(mem.NopBufferPool{}).Free()
	})
}

// BufferBehind is the size of the buffer that a stream keeps behind a batch with one value of so many bytes.
func BufferBehind(batch, value int) int {
	b := newBuilder(standardColumns, batch, &parcels{})
	b.add([]byte("k"), make([]byte, value), 1)
	b.parcel.clear(batch)
	return cap(b.values.data)
}

// DecodeData is how a message is decoded with one copy; not ok: package proto does it.
func DecodeData(pieces ...[]byte) (d *arrowflight.FlightData, ok bool) {
	var data mem.BufferSlice
	for _, p := range pieces {
		data = append(data, mem.SliceBuffer(p))
	}
	d = &arrowflight.FlightData{}
	return d, decode(data, d)
}
