package flight

import (
	"context"
	"fmt"
	"sync"
	"time"

	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

const (
	// trackedBytes is the smallest buffer whose end gRPC tells (mem.NewBuffer).
	trackedBytes = 4 << 10
	// maxRequestBytes bounds messages of callers that are no batches.
	maxRequestBytes = 2 * maxCommandBytes
)

// outgoing is a message to a caller. gRPC takes a message of any size over before its peer takes it; so what a message holds is held until gRPC has
// written it, or its connection has closed. Its caller has SlowReader for it.
//
// Invariant: it ends once.
type outgoing struct {
	s       *Server
	ctx     context.Context // of its stream
	message any
	then    func(sent bool)
	ended   chan struct{}
	sent    bool // set before ended is closed
	once    sync.Once

	mu     sync.Mutex  // guards all below: a connection that closes ends a message at any moment
	late   *time.Timer // from when it is sent, as unlink
	unlink func() bool // from its connection, which holds it in memory until then
}

// outgoing makes a message for the stream of a context. then, if not nil, is called when it ends.
func (s *Server) outgoing(ctx context.Context, message any, then func(sent bool)) *outgoing {
	return &outgoing{s: s, ctx: ctx, message: message, then: then, ended: make(chan struct{})}
}

// send begins the time that the caller has for a message, which goes to gRPC next.
func (o *outgoing) send() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.late = time.AfterFunc(o.s.cfg.SlowReader, func() { o.s.hangUp(o.ctx) })
	if c := connOf(o.ctx); c != nil {
		o.unlink = context.AfterFunc(c.ctx, func() { o.end(false) }) // gRPC forgets what it has when a connection closes
	}
}

// end ends a message.
func (o *outgoing) end(sent bool) {
	o.once.Do(func() {
		o.mu.Lock()
		if o.late != nil {
			o.late.Stop()
		}
		if o.unlink != nil {
			o.unlink()
		}
		o.mu.Unlock()
		if o.then != nil {
			o.then(sent)
		}
		o.sent = sent
		close(o.ended)
	})
}

// Put is called by gRPC when nothing of it has the message's bytes any more. It implements mem.BufferPool.
func (o *outgoing) Put(b *[]byte) {
	c := connOf(o.ctx)
	o.end(o.ctx.Err() == nil && (c == nil || c.ctx.Err() == nil))
	if m, ok := o.message.(*message); ok {
		o.s.parcels.put(m.parcel, o.s.cfg.BatchBytes)
	} else {
		mem.DefaultBufferPool().Put(b)
	}
}

// Get implements mem.BufferPool.
func (o *outgoing) Get(n int) *[]byte { return mem.DefaultBufferPool().Get(n) }

// taken ends messages that gRPC took over while their streams were closed: it may drop them, and not tell (loopyWriter.preprocessData).
// It implements stats.Handler.
type taken struct{}

// HandleRPC implements stats.Handler.
func (taken) HandleRPC(_ context.Context, event stats.RPCStats) {
	if e, ok := event.(*stats.OutPayload); ok {
		if o, ok := e.Payload.(*outgoing); ok && o.ctx.Err() != nil {
			o.end(false)
		}
	}
}

// TagRPC implements stats.Handler.
func (taken) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// TagConn implements stats.Handler.
func (taken) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (taken) HandleConn(context.Context, stats.ConnStats) {}

// codec is that of gRPC, which tells when an outgoing message is written.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(grpcproto.Name)} }

// Marshal implements encoding.CodecV2.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	o, ok := v.(*outgoing)
	if !ok {
		return c.CodecV2.Marshal(v)
	}
	if m, ok := o.message.(*message); ok {
		return m.buffers(o), nil
	}
	p := o.message.(proto.Message)
	size := proto.Size(p)
	if size == 0 {
		o.end(true)
		return nil, nil
	}
	b := o.Get(max(size, trackedBytes))
	made, err := proto.MarshalOptions{UseCachedSize: true}.MarshalAppend((*b)[:0], p)
	if err != nil {
		o.Put(b)
		return nil, err
	}
	*b = made
	return mem.BufferSlice{mem.NewBuffer(b, o)}, nil
}

// connOf is the connection of a call.
func connOf(ctx context.Context) *conn {
	from, ok := peer.FromContext(ctx)
	if !ok {
		return nil
	}
	info, _ := from.AuthInfo.(peerInfo)
	return info.conn
}

// Unmarshal implements encoding.CodecV2. Messages that are no batches are small.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	d, ok := v.(*arrowflight.FlightData)
	if !ok && data.Len() > maxRequestBytes {
		return fmt.Errorf("a request of %d bytes, at most %d", data.Len(), maxRequestBytes)
	}
	if ok && decode(data, d) {
		return nil
	}
	return c.CodecV2.Unmarshal(data, v)
}

// SendMsg sends a message when the one before is written. So a stream holds one message that its caller has not read, and works on the next.
func (a *admitted) SendMsg(m any) error {
	o, ok := m.(*outgoing)
	if !ok {
		o = a.s.outgoing(a.ctx, m, nil)
	}
	if err := a.drain(); err != nil {
		o.end(false)
		return err
	}
	a.last = o
	o.send() // now: while it waits, its caller has the time of the one before
	return a.ServerStream.SendMsg(o)
}

// drain waits until what was sent is written.
func (a *admitted) drain() error {
	if a.last == nil {
		return nil
	}
	select {
	case <-a.last.ended:
		if err := a.ctx.Err(); err != nil || a.last.sent {
			return err
		}
		return status.Error(codes.Unavailable, "the connection is closed") // gRPC has yet to end the context
	case <-a.ctx.Done():
		return a.ctx.Err()
	}
}
