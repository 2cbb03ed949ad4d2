//go:build linux

package pulse

import (
	"encoding/binary"
	"net/netip"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// socket is a UDP socket that the poller of the Go runtime does not know: a datagram that
// arrives wakes no thread. It is used by one goroutine.
type socket struct {
	fd     int
	at     netip.AddrPort // bound
	closed atomic.Bool
	from   unix.RawSockaddrInet6 // or of IPv4, which is smaller; also to
	to     unix.RawSockaddrInet6
	b      [maxBytes + 1]byte
}

// receiveBytes have room for what thousands of members send in a tick.
const receiveBytes = 4 << 20

func openSocket(at netip.AddrPort) (*socket, error) {
	family := unix.AF_INET
	if at.Addr().Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, receiveBytes) // the kernel has a limit of its own
	s := &socket{fd: fd}
	if err := unix.Bind(fd, sockaddr(at)); err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("bind", err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("getsockname", err)
	}
	s.at = addrOf(name)
	return s, nil
}

func sockaddr(at netip.AddrPort) unix.Sockaddr {
	if at.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
}

func addrOf(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

// receive returns a datagram that is there; false if there is none. The bytes are used again.
//
// Neither this call nor that of send waits: both are hidden from the scheduler of the Go runtime,
// whose monitor would wake up for each of them.
func (s *socket) receive() (from netip.AddrPort, b []byte, ok bool) {
	for !s.closed.Load() {
		size := uint32(unsafe.Sizeof(s.from))
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(s.fd), uintptr(unsafe.Pointer(&s.b)), uintptr(len(s.b)), unix.MSG_DONTWAIT,
			uintptr(unsafe.Pointer(&s.from)), uintptr(unsafe.Pointer(&size)))
		switch errno {
		case 0:
			return s.source(), s.b[:n], true
		case unix.EINTR, unix.ECONNREFUSED: // the latter is of a datagram that was sent
		default:
			return from, nil, false
		}
	}
	return from, nil, false
}

// source is the address in from.
func (s *socket) source() netip.AddrPort {
	port := binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(&s.from.Port))[:])
	if s.from.Family == unix.AF_INET {
		return netip.AddrPortFrom(netip.AddrFrom4((*unix.RawSockaddrInet4)(unsafe.Pointer(&s.from)).Addr), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16(s.from.Addr).Unmap(), port)
}

// send sends a datagram, or loses it.
func (s *socket) send(to netip.AddrPort, b []byte) {
	if s.closed.Load() || len(b) == 0 {
		return
	}
	var size uintptr
	if to.Addr().Is4() {
		size = unix.SizeofSockaddrInet4
		(*unix.RawSockaddrInet4)(unsafe.Pointer(&s.to)).Addr = to.Addr().As4()
		s.to.Family = unix.AF_INET
	} else {
		size = unix.SizeofSockaddrInet6
		s.to = unix.RawSockaddrInet6{Family: unix.AF_INET6, Addr: to.Addr().As16()}
	}
	binary.BigEndian.PutUint16((*[2]byte)(unsafe.Pointer(&s.to.Port))[:], to.Port())
	_, _, _ = unix.RawSyscall6(unix.SYS_SENDTO, uintptr(s.fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL,
		uintptr(unsafe.Pointer(&s.to)), size)
}

func (s *socket) close() error {
	if s.closed.Swap(true) {
		return nil
	}
	return os.NewSyscallError("close", unix.Close(s.fd))
}
