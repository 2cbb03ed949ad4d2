package httpserver

import (
	"sync"
	"sync/atomic"
)

// Reason why a request or a connection was refused.
type Reason int

const (
	Unauthenticated Reason = iota // a call without its token or mark
	Compressed                    // a call with a compressed body
	Large                         // a body over its procedure's limit, or one that came too slowly
	Host                          // a Host that is no name of a port on loopback
	Origin                        // a web page of another origin
	PreAuth                       // a connection that authenticated nothing, closed for a newer one or because it sent too much
	Full                          // a connection over the limit of all
	reasons
)

func (r Reason) String() string {
	return [reasons]string{"unauthenticated", "compressed", "large", "host", "origin", "preauth", "full"}[r]
}

// Port counts what happens at the ports of one name in this process.
type Port struct {
	Name    string
	open    atomic.Int64
	refused [reasons]atomic.Uint64
}

func (p *Port) count(r Reason) { p.refused[r].Add(1) }

// Open is the number of connections.
func (p *Port) Open() int64 { return p.open.Load() }

// Refused calls do with each reason and its count.
func (p *Port) Refused(do func(Reason, uint64)) {
	for r := range p.refused {
		do(Reason(r), p.refused[r].Load())
	}
}

var ports struct {
	sync.Mutex
	all []*Port
}

// Ports of this process, for its metrics.
func Ports() []*Port {
	ports.Lock()
	defer ports.Unlock()
	return append([]*Port(nil), ports.all...)
}

func portNamed(name string) *Port {
	ports.Lock()
	defer ports.Unlock()
	for _, p := range ports.all {
		if p.Name == name {
			return p
		}
	}
	p := &Port{Name: name}
	ports.all = append(ports.all, p)
	return p
}
