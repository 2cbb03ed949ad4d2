package pulse

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
)

// Port is where pulses are heard, before it is known of which cluster.
type Port struct {
	socket  *socket
	send    func(to netip.AddrPort, b []byte)
	receive func() (from netip.AddrPort, b []byte, ok bool)
	host    string // as others are told
}

// Listen opens a UDP port, host:port; port 0 takes a free one. advertise is the name or
// address that others reach it by; "" is that of listen.
func Listen(ctx context.Context, listen, advertise string) (*Port, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return nil, fmt.Errorf("pulse on %q: want host:port: %w", listen, err)
	}
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return nil, fmt.Errorf("pulse on %q: port %q: want a number", listen, port)
	}
	at, err := resolve(ctx, cmp.Or(host, "0.0.0.0"))
	if err != nil {
		return nil, fmt.Errorf("pulse on %q: %w", listen, err)
	}
	p := &Port{host: cmp.Or(advertise, host)}
	// The name of a container may be known only after it has said that it is ready: what is
	// advertised is not resolved here.
	if at.IsUnspecified() && advertise == "" {
		ip, err := own()
		if err != nil {
			return nil, fmt.Errorf("pulse on %q: %w", listen, err)
		}
		p.host = ip.String()
	}
	if p.socket, err = openSocket(netip.AddrPortFrom(at, uint16(number))); err != nil {
		return nil, fmt.Errorf("pulse on %s: %w", listen, err)
	}
	p.send, p.receive = p.socket.send, p.socket.receive
	return p, nil
}

// Address is where others reach the port.
func (p *Port) Address() string {
	return net.JoinHostPort(p.host, strconv.Itoa(int(p.socket.at.Port())))
}

// Close closes a port that no List has taken over.
func (p *Port) Close() error { return p.socket.close() }

// resolve is the address of a name; IPv4 before IPv6.
func resolve(ctx context.Context, host string) (netip.Addr, error) {
	if ip, err := netip.ParseAddr(host); err == nil {
		return ip.Unmap(), nil
	}
	ctx, cancel := context.WithTimeout(ctx, resolveTime)
	defer cancel()
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return netip.Addr{}, err
	}
	for _, ip := range ips {
		if ip = ip.Unmap(); ip.Is4() {
			return ip, nil
		}
	}
	return ips[0], nil
}

// own is an address of this host that others may reach; IPv4 before IPv6.
func own() (best netip.Addr, err error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return best, err
	}
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap().IsGlobalUnicast() && (!best.IsValid() || ip.Unmap().Is4() && !best.Is4()) {
			best = ip.Unmap()
		}
	}
	if !best.IsValid() {
		return best, errors.New("this host has no address that others reach: name one")
	}
	return best, nil
}
