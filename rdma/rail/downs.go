package rail

import (
	"net/netip"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
)

const (
	// firstHold is how long a path that did not answer is tried after the others; it doubles with each failure, up to lastHold.
	firstHold = time.Second
	lastHold  = time.Minute
	// maxDowns bounds what Downs remembers; more are forgotten, which only costs attempts.
	maxDowns = 4096
)

// Downs remembers which paths did not answer lately, for all lanes of a process: each would have to wait for a dead network by itself
// otherwise. It is a hint: a path that is down is tried last. The zero Downs is ready, and safe for concurrent use.
type Downs struct {
	mu  sync.Mutex // guards all
	all map[way]*down
}

// way is what fails together: an end as seen from a local address.
type way struct {
	from netip.Addr
	to   string
}

type down struct {
	until int64         // clock.Now time
	hold  time.Duration // of the next failure
}

func (d *Downs) is(w way, now int64) bool {
	have := d.all[w]
	return have != nil && now < have.until
}

// Has says whether a path did not answer lately.
func (d *Downs) Has(p Path) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.is(way{p.From, p.End.Address}, clock.Now())
}

// Failed says that a path has not answered. It reports whether that is news.
func (d *Downs) Failed(p Path) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	w, now := way{p.From, p.End.Address}, clock.Now()
	if d.is(w, now) {
		return false
	}
	if d.all == nil || len(d.all) >= maxDowns {
		d.all = map[way]*down{}
	}
	have := d.all[w]
	if have == nil {
		have = &down{hold: firstHold}
		d.all[w] = have
	}
	have.until = clock.In(have.hold)
	have.hold = min(2*have.hold, lastHold)
	return true
}

// Answered says that a path has answered.
func (d *Downs) Answered(p Path) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.all, way{p.From, p.End.Address})
}
