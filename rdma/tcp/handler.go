package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

const (
	// idleBytes is the buffer, in each direction, of a connection that has only
	// had short chains.
	idleBytes = 8 << 10
	// wholeBytes is the longest frame, or answer, that is dealt with in one piece.
	wholeBytes = 64 << 10
	// pieceBytes holds the longest verb of a longer one.
	pieceBytes = wholeBytes + rdma.MaxVerbBytes
)

const (
	// maxLong bounds the long chains that a server executes at a time, and with them the memory
	// that lanes hold: two pieces each.
	maxLong = 64
	// longTimeout bounds how long one of them may take to come in.
	longTimeout = time.Minute
)

// pieces are buffers of pieceBytes, lent to a connection for one long chain.
var pieces = sync.Pool{New: func() any { b := make([]byte, pieceBytes); return &b }}

// handler executes the frames of one lane, one after the other.
type handler struct {
	nc     net.Conn    // the socket, or TLS over it
	lane   *host.Lane  // the lane's access; its Run executes the verbs
	rx     []byte      // receive buffer: idleBytes, wholeBytes once a long frame has come
	r, w   int         // unread bytes are rx[r:w]
	tx     []byte      // storage of answers, but for those of long chains
	verbs  []rdma.Verb // storage of the present chain
	timed  bool        // a read deadline is set
	waited int64       // when the write deadline was last moved
	until  time.Time   // when the long chain in hand must have come in; zero: there is none

	ctx  context.Context // ends with the connection
	busy chan struct{}   // has an element for each long chain of the server
}

// newHandler makes the handler of one connection. busy is the server's, and bounds the long chains
// that it executes at once.
func newHandler(ctx context.Context, nc net.Conn, lane *host.Lane, busy chan struct{}) *handler {
	return &handler{ctx: ctx, nc: nc, lane: lane, busy: busy, rx: make([]byte, idleBytes), tx: make([]byte, idleBytes)}
}

// serve answers frames, in their order, until the connection or the lane ends.
func (h *handler) serve() error {
	for {
		err := h.frame()
		ended := h.lane.Ended()
		if errors.Is(ended, rdma.ErrRevoked) {
			h.farewell(ended)
		}
		if err == nil {
			err = ended
		}
		if err != nil {
			return err
		}
	}
}

// frame deals with one frame.
func (h *handler) frame() error {
	if err := h.need(headBytes); err != nil {
		return err
	}
	f, err := decodeHead(h.rx[h.r:])
	if err != nil {
		return err
	}
	if f.kind == kindOpen {
		return h.open(&f)
	}
	size := headBytes + f.verbs*host.VerbBytes
	if err := h.need(size); err != nil {
		return err
	}
	var results int
	h.verbs, results, err = host.DecodeVerbs(h.verbs[:0], h.rx[h.r+headBytes:h.r+size], f.payload)
	if err != nil {
		return err
	}
	if size+int(f.payload) > wholeBytes || answerBytes+results > wholeBytes {
		h.r += size
		return h.long(&f)
	}
	if err := h.need(size + int(f.payload)); err != nil {
		return err
	}
	h.r += size
	return h.whole(&f, results)
}

// whole executes a chain that has come in completely: READs go from the region
// straight into the answer.
func (h *handler) whole(f *head, results int) error {
	h.tx = room(h.tx, answerBytes+results)
	at := answerBytes
	for i := range h.verbs {
		v := &h.verbs[i]
		switch v.Op {
		case rdma.Read:
			v.Buf = h.tx[at : at+int(v.Bytes)]
			at += len(v.Buf)
		case rdma.Write:
			v.Buf = h.rx[h.r : h.r+int(v.Bytes)]
			h.r += len(v.Buf)
		case rdma.CompareSwap, rdma.FetchAdd, rdma.Verify:
			at += 8
		}
	}
	done, err := h.lane.Run(f.slot, f.key, h.verbs)
	for err == host.ErrHeld {
		if err = h.held(); err != nil {
			return err
		}
		var more int
		more, err = h.lane.Run(f.slot, f.key, h.verbs[done:])
		done += more
	}
	at = answerBytes
	for i := range h.verbs[:done] {
		at = host.PutResult(h.tx, at, &h.verbs[i])
	}
	return h.answer(h.tx, f, done, at, err, true)
}

// held waits until the rest of a chain is to be run. It reads ahead meanwhile, so that it notices the end of the connection:
// of a client that has died the node learns by that first.
func (h *handler) held() error {
	if h.w == len(h.rx) {
		return h.lane.AwaitHeld(h.ctx)
	}
	ctx, cancel := context.WithCancel(h.ctx)
	defer cancel()
	read := 0
	done := make(chan struct{})
	go func() {
		defer close(done)
		var err error
		if read, err = h.nc.Read(h.rx[h.w:]); read == 0 && err != nil {
			cancel()
		}
	}()
	err := h.lane.AwaitHeld(ctx)
	h.nc.SetReadDeadline(time.Unix(1, 0)) // ends the read
	<-done
	h.timed = false
	h.w += read
	return errors.Join(err, h.nc.SetReadDeadline(time.Time{}))
}

// long executes a chain verb by verb while it comes in, and answers it in pieces,
// in memory that does not depend on what the peer says. It waits while maxLong others are
// executed.
func (h *handler) long(f *head) error {
	select {
	case h.busy <- struct{}{}:
	case <-h.ctx.Done():
		return h.ctx.Err()
	}
	h.until = time.Now().Add(longTimeout)
	defer func() {
		h.until = time.Time{}
		<-h.busy
	}()
	inPiece, outPiece := pieces.Get().(*[]byte), pieces.Get().(*[]byte)
	defer func() { pieces.Put(inPiece); pieces.Put(outPiece) }()
	in, out := *inPiece, *outPiece
	at, done := answerBytes, 0
	left := int(f.payload)
	var err error
	for i := range h.verbs {
		v := &h.verbs[i]
		switch v.Op {
		case rdma.Read:
			v.Buf = out[at : at+int(v.Bytes)]
		case rdma.Write:
			v.Buf = in[:v.Bytes]
			left -= len(v.Buf)
			if err := h.full(v.Buf); err != nil {
				return err
			}
		}
		var ran int
		if ran, err = h.lane.Run(f.slot, f.key, h.verbs[i:i+1]); ran == 0 {
			break
		}
		done++
		at = host.PutResult(out, at, v)
		if at > wholeBytes-8 && done < len(h.verbs) {
			if err := h.answer(out, f, done, at, nil, false); err != nil {
				return err
			}
			at = answerBytes
		}
	}
	for left > 0 { // of verbs that never run
		n := min(left, len(in))
		if err := h.full(in[:n]); err != nil {
			return err
		}
		left -= n
	}
	return h.answer(out, f, done, at, err, true)
}

// answer sends what stands in b behind the room for its header.
func (h *handler) answer(b []byte, f *head, done, end int, err error, last bool) error {
	a := answer{kind: kindChain, code: host.Code(err), done: done, seq: f.seq, results: end - answerBytes, last: last}
	a.put(b)
	return h.send(b[:end])
}

// send writes to the client, which has peerTimeout to take it.
func (h *handler) send(b []byte) error {
	if now := clock.Now(); now-h.waited > int64(time.Second) {
		// Moving the deadline costs as much as a short copy: once in a second.
		h.waited = now
		h.nc.SetWriteDeadline(time.Now().Add(peerTimeout))
	}
	_, err := h.nc.Write(b)
	return err
}

// open answers a request to open a region.
func (h *handler) open(f *head) error {
	if err := h.need(headBytes + host.OpenRequestBytes); err != nil {
		return err
	}
	o, err := host.DecodeOpenRequest(h.rx[h.r+headBytes : h.r+headBytes+host.OpenRequestBytes])
	if err != nil {
		return errFrame
	}
	h.r += headBytes + host.OpenRequestBytes
	w, _, err := h.lane.Open(o.Region, o.Epoch, o.Slot)
	reply := host.OpenAnswer{Tag: o.Tag, Err: err, Key: w.Key, Bytes: w.Bytes, Flush: w.Flush, Verifies: w.Verifies}
	a := answer{kind: kindOpen, seq: f.seq, results: host.OpenAnswerBytes, last: true}
	a.put(h.tx)
	return h.send(reply.Append(h.tx[:answerBytes]))
}

// farewell tells a client that its session is revoked. It may never read it.
func (h *handler) farewell(err error) {
	a := answer{kind: kindChain, code: host.Code(err), seq: farewellSeq, last: true}
	a.put(h.tx)
	h.nc.SetWriteDeadline(time.Now().Add(time.Second))
	h.nc.Write(h.tx[:answerBytes])
}

// need reads until n bytes of the frame are there.
// Preconditions: n <= wholeBytes, or <= maxHead.
func (h *handler) need(n int) error {
	for h.w-h.r < n {
		if h.r == h.w {
			h.r, h.w = 0, 0
		}
		if h.r+n > len(h.rx) {
			// A claimed length is at most wholeBytes here.
			grown := h.rx
			if n > len(grown) {
				grown = make([]byte, max(wholeBytes, maxHead))
			}
			h.r, h.w = 0, copy(grown, h.rx[h.r:h.w])
			h.rx = grown
		}
		if err := h.patience(h.w > h.r); err != nil {
			return err
		}
		got, err := h.nc.Read(h.rx[h.w:])
		h.w += got
		if got == 0 && err != nil {
			return err
		}
	}
	return nil
}

// full reads len(b) bytes of payload, past the buffer when they are many.
func (h *handler) full(b []byte) error {
	n := copy(b, h.rx[h.r:h.w])
	h.r += n
	if n == len(b) {
		return nil
	}
	h.timed = false // every verb has its own time
	if err := h.patience(true); err != nil {
		return err
	}
	_, err := io.ReadFull(h.nc, b[n:])
	return err
}

// patience sets a deadline for the rest of a frame, and none for its beginning.
func (h *handler) patience(begun bool) error {
	if begun == h.timed {
		return nil
	}
	h.timed = begun
	var at time.Time
	if begun {
		at = time.Now().Add(peerTimeout)
		if !h.until.IsZero() && h.until.Before(at) {
			at = h.until
		}
	}
	return h.nc.SetReadDeadline(at)
}

// room returns a buffer of at least n <= wholeBytes bytes.
func room(b []byte, n int) []byte {
	if len(b) >= n {
		return b
	}
	return make([]byte, wholeBytes)
}
