package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

const (
	// helloTimeout bounds how long a connection may take to say who it is.
	helloTimeout = 5 * time.Second
	// answerTimeout bounds how long a client may take to accept an answer.
	answerTimeout = 30 * time.Second
	// maxGreeting bounds the connections that have not said who they are yet.
	maxGreeting = 1024
	// keepBytes is the buffer that an idle connection keeps.
	keepBytes = 64 << 10
)

// Server executes the chains of tcp clients on a node's regions.
type Server struct {
	access *host.Access
	log    *slog.Logger

	mu       sync.Mutex
	conns    map[net.Conn]struct{}
	closed   bool
	cancels  []context.CancelFunc // of the listeners
	wg       sync.WaitGroup
	greeting chan struct{}
}

// NewServer makes a server over a node's access control.
func NewServer(a *host.Access, log *slog.Logger) *Server {
	return &Server{access: a, log: log, conns: map[net.Conn]struct{}{}, greeting: make(chan struct{}, maxGreeting)}
}

// Serve accepts connections until the listener fails or Close is called, which
// makes it return nil.
func (s *Server) Serve(l net.Listener) error {
	stop := context.AfterFunc(s.context(), func() { l.Close() })
	defer stop()
	for {
		nc, err := l.Accept()
		if err != nil {
			s.mu.Lock()
			closed := s.closed
			s.mu.Unlock()
			if closed {
				return nil
			}
			var te interface{ Temporary() bool }
			if errors.As(err, &te) && te.Temporary() {
				// Out of file descriptors, most likely: those in use will end.
				s.log.Warn("tcp fabric: accept", "error", err)
				time.Sleep(10 * time.Millisecond)
				continue
			}
			return fmt.Errorf("tcp fabric on %v: %w", l.Addr(), err)
		}
		select {
		case s.greeting <- struct{}{}:
		default:
			nc.Close()
			continue
		}
		if !s.track(nc) {
			<-s.greeting
			nc.Close()
			continue
		}
		go func() {
			defer s.wg.Done()
			defer s.forget(nc)
			s.handle(nc)
		}()
	}
}

// context ends with the server.
func (s *Server) context() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		cancel()
		return ctx
	}
	s.cancels = append(s.cancels, cancel)
	return ctx
}

func (s *Server) track(nc net.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.conns[nc] = struct{}{}
	s.wg.Add(1)
	return true
}

func (s *Server) forget(nc net.Conn) {
	nc.Close()
	s.mu.Lock()
	delete(s.conns, nc)
	s.mu.Unlock()
}

// Close ends every connection and returns when no chain runs any more.
func (s *Server) Close() {
	s.mu.Lock()
	s.closed = true
	for _, cancel := range s.cancels {
		cancel()
	}
	for nc := range s.conns {
		nc.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// handle serves one connection.
func (s *Server) handle(nc net.Conn) {
	lane, err := s.greet(nc)
	<-s.greeting
	if err != nil {
		s.log.Debug("tcp fabric: hello", "peer", nc.RemoteAddr(), "error", err)
		return
	}
	defer lane.Leave()
	h := &handler{nc: nc, lane: lane}
	if err := h.serve(); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		s.log.Debug("tcp fabric: connection ended", "peer", nc.RemoteAddr(), "error", err)
	}
}

// greet reads hello, admits the lane and answers welcome. Admit ends an older
// connection of the same lane first, so a welcome proves that it is dead.
func (s *Server) greet(nc net.Conn) (*host.Lane, error) {
	ctx, cancel := context.WithTimeout(context.Background(), helloTimeout)
	defer cancel()
	_ = nc.SetDeadline(time.Now().Add(helloTimeout))
	var hello [helloBytes]byte
	if _, err := io.ReadFull(nc, hello[:]); err != nil {
		return nil, err
	}
	if [8]byte(hello[:8]) != magic {
		return nil, fmt.Errorf("%w: %x is not its magic", errFrame, hello[:8])
	}
	t, err := rdma.DecodeTicket(hello[8 : 8+rdma.TicketBytes])
	var lane *host.Lane
	if err == nil {
		lane, err = s.access.Admit(ctx, &t, le.Uint32(hello[8+rdma.TicketBytes:]), host.Entry{Provider: "tcp", Stop: func() { nc.Close() }})
	} else {
		err = rdma.ErrTicket
	}
	var welcome [welcomeBytes]byte
	copy(welcome[:], magic[:])
	le.PutUint32(welcome[8:], uint32(codeOf(err)))
	node, incarnation := s.access.Node()
	le.PutUint32(welcome[12:], node)
	le.PutUint64(welcome[16:], incarnation)
	if _, werr := nc.Write(welcome[:]); werr != nil && err == nil {
		lane.Leave()
		return nil, werr
	}
	if err == nil {
		err = nc.SetDeadline(time.Time{})
	}
	return lane, err
}

// handler runs the frames of one lane, one after the other.
type handler struct {
	nc   net.Conn
	lane *host.Lane
	rx   []byte // unread bytes are rx[r:w]
	r, w int
	tx   []byte
	q    request
}

func (h *handler) serve() error {
	h.rx = make([]byte, 4096)
	for {
		frame, err := h.next()
		if err != nil {
			return err
		}
		answer, err := h.q.parse(frame)
		if err != nil {
			return err
		}
		h.tx = room(h.tx, answerHead+answer)
		var body int
		var code uint16
		done := 0
		if h.q.kind == kindOpen {
			w, _, err := h.lane.Open(h.q.region, h.q.epoch, h.q.slot)
			code = codeOf(err)
			le.PutUint64(h.tx[answerHead:], w.Key)
			le.PutUint64(h.tx[answerHead+8:], w.Bytes)
			body = 16
		} else {
			done, code, body = h.run()
		}
		le.PutUint32(h.tx, uint32(answerHead-4+body))
		le.PutUint16(h.tx[4:], code)
		le.PutUint16(h.tx[6:], uint16(done))
		if answerHead+body > keepBytes {
			// A client that does not read must not keep this goroutine for ever.
			_ = h.nc.SetWriteDeadline(time.Now().Add(answerTimeout))
		}
		if _, err := h.nc.Write(h.tx[:answerHead+body]); err != nil {
			return err
		}
		h.shrink()
	}
}

// run executes a chain: READs go from the region straight into the answer.
func (h *handler) run() (done int, code uint16, body int) {
	verbs := h.q.verbs
	at := answerHead
	for i := range verbs {
		v := &verbs[i]
		switch v.Op {
		case rdma.Read:
			n := int(v.Bytes)
			v.Buf, v.Bytes = h.tx[at:at+n:at+n], 0
			clear(h.tx[at+n : at+pad(n)])
			at += pad(n)
		case rdma.CompareSwap, rdma.FetchAdd:
			at += 8
		}
	}
	done, err := h.lane.Run(h.q.slot, h.q.key, verbs)
	at = answerHead
	for i := range verbs[:done] {
		v := &verbs[i]
		switch v.Op {
		case rdma.Read:
			at += pad(len(v.Buf))
		case rdma.CompareSwap, rdma.FetchAdd:
			le.PutUint64(h.tx[at:], v.Old)
			at += 8
		}
	}
	return done, codeOf(err), at - answerHead
}

// next returns the next frame without its length word, good until the next call.
func (h *handler) next() ([]byte, error) {
	for {
		have := h.w - h.r
		need := 4
		if have >= 4 {
			size := le.Uint32(h.rx[h.r:])
			if size > maxFrame {
				return nil, fmt.Errorf("%w: it says it has %d bytes, the most is %d", errFrame, size, maxFrame)
			}
			need += int(size)
			if have >= need {
				frame := h.rx[h.r+4 : h.r+need]
				if h.r += need; h.r == h.w {
					h.r, h.w = 0, 0
				}
				return frame, nil
			}
		}
		if h.r+need > len(h.rx) {
			// Grow as bytes arrive, at most twofold: a frame that only says it is
			// large costs nothing.
			if h.r > 0 {
				copy(h.rx, h.rx[h.r:h.w])
				h.w, h.r = have, 0
			}
			if need > len(h.rx) && h.w == len(h.rx) {
				nb := make([]byte, min(2*len(h.rx), maxFrame+4))
				copy(nb, h.rx[:h.w])
				h.rx = nb
			}
		}
		n, err := h.nc.Read(h.rx[h.w:])
		if err != nil {
			return nil, err
		}
		h.w += n
	}
}

// shrink gives large buffers back once the connection is idle again.
func (h *handler) shrink() {
	if len(h.tx) > keepBytes {
		h.tx = nil
	}
	if len(h.rx) > keepBytes && h.w == 0 {
		h.rx = make([]byte, 4096)
	}
}

// room returns a buffer of at least n bytes.
func room(b []byte, n int) []byte {
	if len(b) >= n {
		return b
	}
	return make([]byte, max(n, 4096))
}
