package tcp

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"golang.org/x/sys/unix"
)

// socket is the client's side of the stream. It never waits for the node to read
// before it has looked for something to read itself: both sides sending at once
// cannot block each other.
//
// It parks in the runtime's poller at once. Looking again for 30 us before that, where
// no other socket of the process waits, was measured on two cores: a fifth more READs
// a second where they are idle, and up to half as many where they are busy.
type socket struct {
	nc  *net.TCPConn    // of the present connection, for deadlines
	raw syscall.RawConn // of nc, for reads and writes that do not wait

	out      []byte   // frames; the storage of some segments
	start    int      // of what is not yet cut into segments
	segments [][]byte // to send, in order
	sent     int      // of segments[0]
	armed    int64    // the read deadline that is set, in clock.Now time

	// Of an encrypted connection.
	tls      *tls.Conn // over a records of this socket; nil: plain
	sealed   []byte    // the record under way
	away     int       // bytes of it that are sent
	deadline int64     // of the read under way

	// Arguments and results of the two callbacks, which are made once: a closure
	// made for each call would be an allocation for each call.
	onRead, onWrite func(fd uintptr) bool // readOnce and writeOnce, bound to this socket
	buf             []byte                // what the callback reads into or writes from
	park            bool                  // readOnce waits for input when there is none
	n               int                   // bytes that the callback has moved
	err             error                 // of the callback, EAGAIN where it would have to wait
}

// attach takes a new connection in the place of the old one.
func (s *socket) attach(nc *net.TCPConn, raw syscall.RawConn, over *tls.Conn) {
	if s.onRead == nil {
		s.onRead, s.onWrite = s.readOnce, s.writeOnce
	}
	s.nc, s.raw, s.armed, s.tls = nc, raw, 0, over
	s.drop()
}

// drop forgets what has not been sent.
func (s *socket) drop() {
	s.out, s.segments, s.start, s.sent = s.out[:0], s.segments[:0], 0, 0
	s.sealed, s.away = s.sealed[:0], 0
}

// cut makes a segment of what was appended to out.
func (s *socket) cut() {
	if s.start < len(s.out) {
		s.segments = append(s.segments, s.out[s.start:len(s.out):len(s.out)])
		s.start = len(s.out)
	}
}

// pump sends what the socket takes without waiting. Errors show when reading.
func (s *socket) pump() {
	for i, segment := range s.segments {
		for s.sent < len(segment) || s.away < len(s.sealed) {
			if s.buf = segment[s.sent:]; s.tls != nil {
				s.buf = s.record(segment)
			}
			if err := s.raw.Write(s.onWrite); err != nil {
				s.err = err
			}
			s.buf = nil
			if s.err == unix.EAGAIN {
				s.segments = s.segments[:copy(s.segments, s.segments[i:])]
				return
			}
			if s.err != nil {
				s.drop()
				return
			}
			if s.tls != nil {
				s.away += s.n
			} else {
				s.sent += s.n
			}
		}
		s.sent = 0
	}
	s.drop()
}

// record is what is left to send of the present record, or of a new one of the segment: one at a
// time, so that what is not sent yet takes no memory twice.
func (s *socket) record(segment []byte) []byte {
	if s.away == len(s.sealed) {
		s.sealed, s.away = s.sealed[:0], 0
		n := min(recordBytes, len(segment)-s.sent)
		s.tls.Write(segment[s.sent : s.sent+n]) // goes into sealed; of a connection that has failed, nothing
		s.sent += n
	}
	return s.sealed[s.away:]
}

// writeOnce makes one write. The poller calls it when the socket can take bytes.
func (s *socket) writeOnce(fd uintptr) bool {
	s.n, s.err = unix.Write(int(fd), s.buf)
	if s.err == unix.EINTR {
		s.n, s.err = 0, nil
	}
	return true
}

// readOnce makes one read. false: nothing has come yet, and the poller waits.
func (s *socket) readOnce(fd uintptr) bool {
	for {
		s.n, s.err = unix.Read(int(fd), s.buf)
		switch s.err {
		case unix.EINTR:
		case unix.EAGAIN:
			return !s.park
		default:
			return true
		}
	}
}

// read returns some bytes, sending what is left to send meanwhile. deadline is as
// in rdma.Conn.
func (s *socket) read(b []byte, deadline int64) (int, error) {
	if s.tls == nil {
		return s.receive(b, deadline)
	}
	s.deadline = deadline
	return s.tls.Read(b)
}

// receive is read before decryption.
func (s *socket) receive(b []byte, deadline int64) (int, error) {
	s.before(deadline)
	for {
		s.pump()
		s.buf, s.park = b, len(s.segments) == 0
		if err := s.raw.Read(s.onRead); err != nil {
			s.err = err
		}
		s.buf = nil
		switch {
		case s.err == nil && s.n > 0:
			return s.n, nil
		case s.err == nil:
			return 0, io.EOF
		case s.err == unix.EAGAIN:
			if err := s.pollBoth(deadline); err != nil {
				return 0, err
			}
		case errors.Is(s.err, os.ErrDeadlineExceeded):
			if deadline != 0 && clock.Now() >= deadline {
				return 0, s.err
			}
			s.arm(deadline)
		default:
			return 0, s.err
		}
	}
}

// before makes reads wait no longer than the deadline. Moving the socket's own
// deadline costs as much as a short copy, so that an earlier one stays: when it
// passes, read looks at the clock and moves it then.
func (s *socket) before(deadline int64) {
	if deadline != 0 && (s.armed == 0 || s.armed > deadline) {
		s.arm(deadline)
	}
}

// arm sets the deadline of reads and writes; 0: none.
func (s *socket) arm(deadline int64) {
	s.armed = deadline
	var at time.Time
	if deadline != 0 {
		at = time.Now().Add(time.Duration(deadline - clock.Now()))
	}
	s.nc.SetReadDeadline(at)
}

// pollBoth waits until the socket can be read or written. It blocks a thread,
// which is why it is only used in the middle of a long chain.
func (s *socket) pollBoth(deadline int64) error {
	wait := 100 * time.Millisecond // Close does not wake a poll
	if deadline != 0 {
		left := time.Duration(deadline - clock.Now())
		if left <= 0 {
			return os.ErrDeadlineExceeded
		}
		wait = min(wait, left+time.Millisecond)
	}
	return s.raw.Control(func(fd uintptr) {
		unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLOUT}}, int(wait.Milliseconds()))
	})
}
