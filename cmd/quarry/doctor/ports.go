package doctor

import (
	"errors"
	"net"
	"net/url"
	"slices"
	"strings"
	"syscall"
)

// FreePorts says which of a service's ports are in use.
func FreePorts(addresses ...string) (out []Finding) {
	for _, a := range addresses {
		l, err := net.Listen("tcp", a)
		switch {
		case err == nil:
			_ = l.Close()
			out = append(out, ok("ports", "%s is free", a))
		case errors.Is(err, syscall.EADDRINUSE):
			out = append(out, found("ports", Info, "if that is not Quarry itself, choose another with --listen, --agent or --metrics-listen", "%s is in use", a))
		default:
			out = append(out, found("ports", Error, "name an address of this host", "%s: %v", a, err))
		}
	}
	return out
}

func loopback(u string) bool {
	p, err := url.Parse(u)
	if err != nil {
		return false
	}
	ip := net.ParseIP(p.Hostname())
	return p.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
}

func contains(urls []string, u string) bool {
	return slices.ContainsFunc(urls, func(x string) bool { return strings.TrimRight(x, "/") == strings.TrimRight(u, "/") })
}

func sorted(s []string) []string {
	slices.Sort(s)
	return s
}
