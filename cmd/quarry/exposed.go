package main

import (
	"net"
	"strings"
)

// guard refuses to serve ports that other hosts reach without asking callers for anything
// (protected is false), unless --insecure is given. exposed: --insecure is given, and other hosts
// reach one of the ports.
func (a *app) guard(protected bool, remedy string, ports ...string) (exposed bool, err error) {
	for _, p := range ports {
		if protected || onLoopback(p) {
			continue
		}
		if !a.cli.Insecure {
			return false, usagef("%s can be reached from other hosts, and any caller could do anything there: give %s, or listen on 127.0.0.1; --insecure goes without", p, remedy)
		}
		a.log.Warn("insecure: any caller that reaches this port may do anything", "port", p)
		exposed = true
	}
	return exposed, nil
}

// guardCluster is guard for the ports of the cluster's own processes.
func (a *app) guardCluster(ports ...string) (bool, error) {
	protected := a.cli.Token != "" || a.trust != nil && a.trust.Mutual()
	return a.guard(protected, "--tls-cert, --tls-key and --tls-ca (see quarry cert), or --token", ports...)
}

// onLoopback says whether HOST:PORT, or unix:PATH, can be reached from this host alone. For a
// name other than localhost it is false, because it may resolve to any address.
func onLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return true // refused where it is listened on, or a path
	}
	ip := net.ParseIP(host)
	return strings.HasPrefix(address, "unix:") || host == "localhost" || ip != nil && ip.IsLoopback()
}
