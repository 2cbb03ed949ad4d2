package shm

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"golang.org/x/sys/unix"
)

const (
	// handshakeTimeout is for one message between two processes of a host.
	handshakeTimeout = 5 * time.Second
	// quiet is how long the node looks into a mailbox after the last request, before it has to be woken: a little longer
	// than a client takes from an answer to its next call.
	quiet = 20 * time.Microsecond
	// maxPreAuth bounds connections that have not shown a ticket yet.
	maxPreAuth = 64
)

// Server hands the memory of one node to clients on the same host.
type Server struct {
	access *host.Access       // admits lanes and makes the gate pages
	log    *slog.Logger       // never nil
	ctx    context.Context    // ends with Close
	cancel context.CancelFunc // of ctx

	mu        sync.Mutex                     // guards listeners, conns and preAuth
	listeners map[*net.UnixListener]struct{} // for Close
	conns     map[*net.UnixConn]struct{}     // every open connection, for Close
	preAuth   int                            // connections whose hello has not been accepted yet; at most maxPreAuth
	served    sync.WaitGroup                 // goroutines of connections; Close waits for them
}

// NewServer makes a server; log may be nil.
func NewServer(a *host.Access, log *slog.Logger) *Server {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Server{access: a, log: log, listeners: make(map[*net.UnixListener]struct{}), conns: make(map[*net.UnixConn]struct{})}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Listen makes the socket at path. It replaces a socket that no process listens on.
func Listen(path string) (*net.UnixListener, error) {
	addr := &net.UnixAddr{Name: path, Net: "unixpacket"}
	l, err := net.ListenUnix("unixpacket", addr)
	if errors.Is(err, unix.EADDRINUSE) {
		if st, err := os.Lstat(path); err != nil || st.Mode().Type() != os.ModeSocket {
			return nil, fmt.Errorf("shm socket %s: a file that is not a socket is in the way: choose another path", path)
		}
		if c, err := net.DialUnix("unixpacket", nil, addr); err == nil {
			c.Close()
			return nil, fmt.Errorf("shm socket %s: another storage node listens there", path)
		} else if !errors.Is(err, unix.ECONNREFUSED) {
			return nil, fmt.Errorf("shm socket %s exists, but not for us: remove it (%w)", path, err)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("shm socket: %w", err)
		}
		l, err = net.ListenUnix("unixpacket", addr)
	}
	if errors.Is(err, unix.EINVAL) {
		return nil, fmt.Errorf("shm socket %s: the path is too long, the kernel takes 107 bytes: use a shorter directory", path)
	}
	if err != nil {
		return nil, fmt.Errorf("shm socket: %w", err)
	}
	return l, nil
}

// Serve accepts clients until Close.
func (s *Server) Serve(l *net.UnixListener) error {
	s.mu.Lock()
	if s.ctx.Err() != nil {
		s.mu.Unlock()
		l.Close()
		return nil
	}
	s.listeners[l] = struct{}{}
	s.mu.Unlock()
	return host.Accept(s.ctx, l, "shm", s.log, s.take)
}

// take starts serving a connection unless too many have shown nothing yet.
func (s *Server) take(nc net.Conn) {
	c := nc.(*net.UnixConn)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil || s.preAuth >= maxPreAuth {
		c.Close()
		return
	}
	s.preAuth++
	s.conns[c] = struct{}{}
	s.served.Go(func() {
		s.serve(c)
		c.Close()
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	})
}

// Close ends all connections and waits for them. Lanes inside a chain are waited
// for, as by Access.Fence.
func (s *Server) Close() error {
	s.cancel()
	s.mu.Lock()
	for l := range s.listeners {
		l.Close()
	}
	for c := range s.conns {
		c.Close()
	}
	s.mu.Unlock()
	s.served.Wait()
	return nil
}

// serve serves one client: the handshake, then its requests to open regions. The client executes
// its verbs itself. When the connection ends the lane leaves.
func (s *Server) serve(c *net.UnixConn) {
	var sending sync.Mutex // memory, against the end of the lane's access
	lane, err := s.handshake(c, &sending)
	s.mu.Lock()
	s.preAuth--
	s.mu.Unlock()
	if err != nil {
		s.log.Info("shm client refused", "err", err)
		return
	}
	defer lane.Leave()
	mail := mailman{server: s, conn: c, lane: lane}
	defer mail.end()
	buf := make([]byte, receiveBytes)
	for {
		b, f, err := receive(c, buf)
		if err != nil {
			return
		}
		if f != nil {
			f.Close()
			return
		}
		if len(b) == len(bell) && b[0] == bell[0] {
			mail.ring()
			continue
		}
		request, err := host.DecodeOpenRequest(b)
		if err != nil {
			return
		}
		if request.Region == rdma.Mailbox {
			mail.start()
		}
		if err := s.open(c, &sending, lane, request); err != nil {
			s.log.Warn("shm open", "region", request.Region, "err", err)
			return
		}
	}
}

// mailman is the goroutine that serves a lane's mailbox, from the first Open of it on.
type mailman struct {
	server *Server
	conn   *net.UnixConn // ended where the messages end
	lane   *host.Lane
	bell   *host.Doorbell // nil: not started
	ended  sync.WaitGroup
}

func (m *mailman) start() {
	if m.bell != nil {
		return
	}
	m.bell = host.NewDoorbell()
	m.ended.Go(func() {
		if err := m.lane.ServeMailbox(quiet, m.bell); err != nil {
			m.server.log.Info("shm messages end", "err", err)
			m.conn.Close()
		}
	})
}

// ring has it look into the mailbox.
func (m *mailman) ring() {
	if m.bell != nil {
		m.bell.Ring()
	}
}

// end returns when it has ended.
func (m *mailman) end() {
	if m.bell != nil {
		m.bell.End()
		m.ended.Wait()
	}
}

// handshake challenges a client and admits its lane.
func (s *Server) handshake(c *net.UnixConn, sending *sync.Mutex) (*host.Lane, error) {
	c.SetDeadline(time.Now().Add(handshakeTimeout))
	challenge := s.access.Challenge()
	if err := send(c, challenge.Append(nil), nil); err != nil {
		return nil, err
	}
	b, f, err := receive(c, make([]byte, receiveBytes))
	if err != nil {
		return nil, err
	}
	if f != nil {
		f.Close()
	}
	hello, err := host.DecodeHello(b)
	if err != nil {
		return nil, err
	}
	lane, page, err := s.admit(c, sending, &hello, &challenge)
	w := host.Welcome{Err: err}
	w.Node, w.Incarnation = s.access.Peer()
	sendErr := send(c, w.Append(nil), page)
	if page != nil {
		page.Close()
	}
	if err == nil && sendErr != nil {
		lane.Leave()
		err = sendErr
	}
	c.SetReadDeadline(time.Time{})
	return lane, err
}

// admit makes the lane of a client whose hello was read, and its gate page. The process of the
// client is found first, so that memory can be taken back from it.
func (s *Server) admit(c *net.UnixConn, sending *sync.Mutex, hello *host.Hello, challenge *host.Challenge) (*host.Lane, *os.File, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, nil, err
	}
	var process *host.Process
	if e := raw.Control(func(fd uintptr) { process, err = host.PeerProcess(int(fd)) }); e != nil || err != nil {
		return nil, nil, errors.Join(e, err)
	}
	if hello.Ticket.Rights == rdma.ReadOnly && process.Reopens() {
		process.Close()
		return nil, nil, rdma.ErrMapping // sealing does not help: writers of other sessions map the same memory
	}
	page, err := host.NewSharedPage()
	if err != nil {
		process.Close()
		return nil, nil, err
	}
	// Waiting for a former lane may take as long as killing its process does.
	c.SetDeadline(time.Time{})
	lane, err := s.access.Admit(s.ctx, hello, challenge,
		host.Entry{Provider: "shm", Stop: func() {
			c.Close()
			sending.Lock()
			sending.Unlock() //lint:ignore SA2001 a send under way has ended
		}, Shared: page, Process: process})
	c.SetWriteDeadline(time.Now().Add(handshakeTimeout))
	if err != nil {
		page.Close()
		process.Close()
		return nil, nil, err
	}
	return lane, page, nil
}

// open answers with a window and the memory behind it.
func (s *Server) open(c *net.UnixConn, sending *sync.Mutex, lane *host.Lane, o host.OpenRequest) error {
	w, m, err := lane.Open(o.Region, o.Epoch, o.Slot)
	a := host.OpenAnswer{Tag: o.Tag, Err: err, Key: w.Key, Bytes: w.Bytes, Flush: w.Flush, Verifies: w.Verifies}
	var f *os.File
	if err == nil {
		a.Offset = m.Offset()
		if f, err = m.Descriptor(lane.Ticket().Rights == rdma.ReadWrite); err != nil {
			return err
		}
		defer f.Close()
	}
	c.SetWriteDeadline(time.Now().Add(handshakeTimeout))
	sending.Lock()
	defer sending.Unlock()
	return send(c, a.Append(nil), f)
}
