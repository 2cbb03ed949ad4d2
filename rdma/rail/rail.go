package rail

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
)

// Policies: what a process that is on rails does where a node is on none of them.
const (
	Warn   = "warn"   // goes by another rail, counts that and logs it
	Strict = "strict" // refuses
)

const (
	// MaxNameBytes of a rail's name.
	MaxNameBytes = 32
	// MaxOwn rails of a process.
	MaxOwn = 16
	// MaxEnds is how many addresses of one provider a node may have.
	MaxEnds = 16
)

// ErrCrossing: the node is on none of the process's rails, and Strict refuses to cross.
var ErrCrossing = errors.New("no common rail")

// Own is a rail that this process is on.
type Own struct {
	Name string
	From netip.Addr // the local address that it is reached from; not valid: the kernel chooses
}

// End is an address at which a node serves its memory.
type End struct {
	Address  string
	Rail     string // "": on no named rail
	Megabits uint32 // a second; 0: unknown
	NUMA     int32  // node that the adapter is attached to; -1: unknown
}

// Path is one way to a node.
type Path struct {
	End     End
	From    netip.Addr // as Own.From
	Crosses bool       // the process is on rails, and the end is at another one
}

// Question is what a choice depends on.
type Question struct {
	Own    []Own           // rails of the process; none: it has named none
	Ends   []End           // of the node, in the order of its row
	Memory int32           // NUMA node of the node's regions; -1: unknown
	Strict bool            // refuse to cross
	Turn   uint32          // number of the lane
	Down   func(Path) bool // whether a path did not answer lately; nil: all did
}

// Choose lists the ways to a node, best first: those that answered before those that did not lately, then the process's own rails
// before unnamed ones and these before others (a crossing), ends beside the memory before those at another NUMA node, fast ones before
// slow ones. Lanes begin with ways that are equal in all of this in turns. A process that has named no rail takes the ends in the
// order of the row.
//
// Postconditions: there is a path, or an error; with Strict no path crosses, and if all would, the error is ErrCrossing.
func Choose(q Question) ([]Path, error) {
	var all []candidate
	for _, e := range q.Ends {
		known := len(all)
		for _, o := range q.Own {
			if o.Name == e.Rail {
				all = append(all, q.candidate(Path{End: e, From: o.From}, same))
			}
		}
		switch {
		case len(all) > known:
		case len(q.Own) == 0 || e.Rail == "":
			all = append(all, q.candidate(Path{End: e}, unnamed))
		case !q.Strict:
			all = append(all, q.candidate(Path{End: e, Crosses: true}, crossing))
		}
	}
	if len(all) == 0 {
		return nil, crossingError(q.Own, q.Ends)
	}
	slices.SortStableFunc(all, candidate.compare)
	equal := 1
	for equal < len(all) && len(q.Own) > 0 && all[0].compare(all[equal]) == 0 {
		equal++
	}
	paths := make([]Path, len(all))
	for i := range all {
		from := i
		if i < equal {
			from = (i + int(q.Turn%uint32(equal))) % equal
		}
		paths[i] = all[from].Path
	}
	return paths, nil
}

// Classes of paths, best first.
const (
	same     = iota // the process is on the end's rail
	unnamed         // nothing is known of it
	crossing        // from a rail to another
)

// candidate is a Path with what it is ordered by: less is better.
type candidate struct {
	Path
	order [4]int
}

func (c candidate) compare(d candidate) int { return slices.Compare(c.order[:], d.order[:]) }

func (q *Question) candidate(p Path, class int) candidate {
	c := candidate{Path: p}
	if q.Down != nil {
		c.order[0] = number(q.Down(p))
	}
	if len(q.Own) > 0 {
		c.order[1], c.order[2], c.order[3] = class, far(p.End.NUMA, q.Memory), -int(p.End.Megabits)
	}
	return c
}

// far is 1 where an access passes from one processor of the node to another.
func far(adapter, memory int32) int { return number(adapter >= 0 && memory >= 0 && adapter != memory) }

func number(b bool) int {
	if b {
		return 1
	}
	return 0
}

// crossingError says which rails do not meet.
func crossingError(own []Own, ends []End) error {
	if len(ends) == 0 {
		return errors.New("the node has no such address")
	}
	var here, there []string
	for _, o := range own {
		here = append(here, o.Name)
	}
	for _, e := range ends {
		there = append(there, e.Rail)
	}
	return fmt.Errorf("%w: this process is on %s, the node on %s, and --rails %s refuses another: name a rail of the node with --rail, or allow it with --rails %s",
		ErrCrossing, strings.Join(here, ", "), strings.Join(there, ", "), Strict, Warn)
}

// GoodName says whether a rail can have a name.
func GoodName(name string) bool {
	return name != "" && len(name) <= MaxNameBytes && strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.") == ""
}

// ParseOwn reads rails of a process, each NAME or NAME=ADDRESS.
func ParseOwn(texts []string) (own []Own, err error) {
	if len(texts) > MaxOwn {
		return nil, fmt.Errorf("%d rails: want at most %d", len(texts), MaxOwn)
	}
	for _, s := range texts {
		name, address, named := strings.Cut(s, "=")
		o := Own{Name: name}
		if !GoodName(name) {
			return nil, fmt.Errorf("rail %q: want NAME or NAME=ADDRESS, with a name of 1 to %d letters, digits, . _ -", s, MaxNameBytes)
		}
		if named {
			if o.From, err = netip.ParseAddr(address); err != nil || o.From.IsUnspecified() {
				return nil, fmt.Errorf("rail %q: want an IP address of this host behind the =", s)
			}
		}
		if slices.Contains(own, o) {
			return nil, fmt.Errorf("rail %q is named twice", s)
		}
		own = append(own, o)
	}
	return own, nil
}

// ParsePolicy reads a policy; "" is Warn.
func ParsePolicy(s string) (strict bool, err error) {
	switch s {
	case "", Warn:
		return false, nil
	case Strict:
		return true, nil
	}
	return false, fmt.Errorf("rails %q: want %s or %s, for nodes that are on no rail of this process", s, Warn, Strict)
}

// Ends are the addresses of one provider at which a node of the table serves its memory.
func Ends(all []*quarrypb.Endpoint, p quarrypb.Provider) (ends []End) {
	for _, e := range all {
		if e.Provider == p {
			end := End{Address: e.Address, Rail: e.Rail, Megabits: e.Megabits, NUMA: -1}
			if e.Numa != nil {
				end.NUMA = int32(*e.Numa)
			}
			ends = append(ends, end)
		}
	}
	return ends
}

// Memory is the NUMA node of a node's regions; -1: unknown.
func Memory(n *quarrypb.Node) int32 {
	if m := n.GetNuma(); m != nil && m.Memory != nil {
		return int32(*m.Memory)
	}
	return -1
}

// Try calls dial for one path after the other until one succeeds. Each has the same share of the time that is left, so that a network
// that swallows everything leaves time for the others. final says that an error is the answer of the node, which other paths would not change.
func Try(ctx context.Context, paths []Path, final func(error) bool, dial func(context.Context, Path) error) error {
	var errs []error
	for i, p := range paths {
		err := within(ctx, len(paths)-i, func(ctx context.Context) error { return dial(ctx, p) })
		if err == nil || final(err) {
			return err
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

// Answered says whether an error is the answer of the node that was meant, which its other addresses would repeat. That a ticket is
// refused is no such answer: a node of another cluster may have the number, and the address at one of the networks.
func Answered(err error) bool {
	return errors.Is(err, rdma.ErrRefused) && !errors.Is(err, rdma.ErrTicket)
}

// within runs f in one of so many shares of the time that is left of a context.
func within(ctx context.Context, shares int, f func(context.Context) error) error {
	end, bounded := ctx.Deadline()
	if !bounded || shares <= 1 {
		return f(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Until(end)/time.Duration(shares))
	defer cancel()
	return f(ctx)
}

// Listen is where a node serves tcp.
type Listen struct{ Rail, Address string }

// ParseListen reads the addresses of a node, comma separated, each [RAIL=]HOST:PORT.
func ParseListen(text string) (all []Listen, err error) {
	for s := range strings.SplitSeq(text, ",") {
		l := Listen{Address: s}
		if name, address, named := strings.Cut(s, "="); named {
			if l.Rail, l.Address = name, address; !GoodName(name) {
				return nil, fmt.Errorf("%q: want [RAIL=]HOST:PORT, with a rail of 1 to %d letters, digits, . _ -", s, MaxNameBytes)
			}
		}
		if _, _, err := net.SplitHostPort(l.Address); err != nil {
			return nil, fmt.Errorf("%q: want [RAIL=]HOST:PORT: %w", s, err)
		}
		all = append(all, l)
	}
	if len(all) > MaxEnds {
		return nil, fmt.Errorf("%d addresses: want at most %d", len(all), MaxEnds)
	}
	return all, nil
}
