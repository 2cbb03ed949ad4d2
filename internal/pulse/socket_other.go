//go:build !linux

package pulse

import (
	"net"
	"net/netip"
	"time"
)

// socket is a UDP socket that is read without waiting.
type socket struct {
	conn *net.UDPConn
	at   netip.AddrPort // bound
	b    [maxBytes + 1]byte
}

func openSocket(at netip.AddrPort) (*socket, error) {
	conn, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
	if err != nil {
		return nil, err
	}
	return &socket{conn: conn, at: conn.LocalAddr().(*net.UDPAddr).AddrPort()}, nil
}

// receive returns a datagram that is there; false if there is none. The bytes are used again.
func (s *socket) receive() (from netip.AddrPort, b []byte, ok bool) {
	_ = s.conn.SetReadDeadline(time.Now().Add(100 * time.Microsecond)) // one that is over reads nothing
	n, from, err := s.conn.ReadFromUDPAddrPort(s.b[:])
	return netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), s.b[:n], err == nil
}

// send sends a datagram, or loses it.
func (s *socket) send(to netip.AddrPort, b []byte) { _, _ = s.conn.WriteToUDPAddrPort(b, to) }

func (s *socket) close() error { return s.conn.Close() }
