package job

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
)

// This file has the order in which jobs are looked at for a part, by their priorities.

// Priority of a job. "" is normal.
type Priority string

const (
	High   Priority = "high"
	Normal Priority = "normal"
	Low    Priority = "low"
)

// priorities in the order in which their jobs are looked at.
var priorities = [...]Priority{High, Normal, Low}

// class is the index of a priority in priorities; that of normal for one that is not known: other programs of the tenant can write records.
func (p Priority) class() int {
	if i := slices.Index(priorities[:], p); i >= 0 {
		return i
	}
	return classNormal
}

const classNormal = 1

// String is never "".
func (p Priority) String() string { return string(cmp.Or(p, Normal)) }

// check refuses a priority that is not known.
func (p Priority) check() error {
	if p == "" || slices.Contains(priorities[:], p) {
		return nil
	}
	return fmt.Errorf("job: priority %q: want %s, %s or %s", string(p), Low, Normal, High)
}

// maxPassed is how many parts in a row of higher priority are begun before lower ones are looked at first.
const maxPassed = 8

// precedence says which priority comes first. The zero value is ready.
//
// Invariant: of maxPassed+1 parts in a row that are begun while one lower priority has parts that can be, one is of that priority; of maxPassed+2 while
// two lower ones have, one of each.
type precedence struct {
	passed [len(priorities)]int // parts of higher priority that were begun since one of this priority was
}

// order is that in which priorities are looked at: those that were passed over too often, then the others, each from high to low.
func (q *precedence) order() (classes [len(priorities)]int) {
	n := 0
	for _, due := range []bool{true, false} {
		for c := range priorities {
			if (q.passed[c] >= maxPassed) == due {
				classes[n] = c
				n++
			}
		}
	}
	return classes
}

// begun records that a part of a priority was begun, while jobs were there of those in present.
func (q *precedence) begun(class int, present [len(priorities)]bool) {
	for c := range priorities {
		switch {
		case c == class || !present[c]:
			q.passed[c] = 0
		case c > class:
			q.passed[c]++
		}
	}
}

// active is a job that has not ended.
type active struct {
	id    uint64
	class int
}

// turns are the order in which a worker looks at jobs. Those of one priority take turns. The zero value is ready.
type turns struct {
	precedence
	last [len(priorities)]uint64 // job of each priority that a part was last begun of, or whose records could not be read
}

// order sorts jobs, which come by their numbers.
func (t *turns) order(jobs []active) []active {
	var by [len(priorities)][]active
	for _, j := range jobs {
		by[j.class] = append(by[j.class], j)
	}
	sorted := make([]active, 0, len(jobs))
	for _, c := range t.precedence.order() {
		first, _ := slices.BinarySearchFunc(by[c], t.last[c]+1, func(j active, id uint64) int { return cmp.Compare(j.id, id) })
		sorted = append(append(sorted, by[c][first:]...), by[c][:first]...)
	}
	return sorted
}

// took records whose turn it was, and whether a part of it was begun. A job whose records could not be read counts too, so that the
// other jobs come before it next time.
func (t *turns) took(j active, begun bool, jobs []active) {
	t.last[j.class] = j.id
	if begun {
		var present [len(priorities)]bool
		for _, o := range jobs {
			present[o.class] = true
		}
		t.begun(j.class, present)
	}
}

// desk hands the slots of a process to workers for several jobs: to the tenants in turn, whatever the priorities of their jobs, and among the jobs of a
// tenant by priority.
type desk struct {
	mu      sync.Mutex
	free    int
	waiting []*wait                // in the order in which they came
	by      map[string]*precedence // by tenant
	turn    map[string]uint64      // of a tenant, when it was last given a slot
	given   uint64                 // slots so far
}

// wait is one worker's.
type wait struct {
	tenant string
	class  int
	slot   chan struct{} // closed when it has one
}

// maxTenants bounds the tenants that are remembered.
const maxTenants = 1024

func newDesk(slots int) *desk {
	return &desk{free: slots, by: map[string]*precedence{}, turn: map[string]uint64{}}
}

// take waits for a slot; false: ctx has ended, or ending is closed, before.
func (d *desk) take(ctx context.Context, ending <-chan struct{}, tenant string, class int) bool {
	me := &wait{tenant, class, make(chan struct{})}
	d.mu.Lock()
	d.waiting = append(d.waiting, me)
	d.serve()
	d.mu.Unlock()
	select {
	case <-me.slot:
		return true
	case <-ctx.Done():
	case <-ending:
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if i := slices.Index(d.waiting, me); i >= 0 {
		d.waiting = slices.Delete(d.waiting, i, i+1)
	} else { // it was given one meanwhile
		d.free++
		d.serve()
	}
	return false
}

// begun records that the worker that has a slot has begun a part.
func (d *desk) begun(tenant string, class int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var present [len(priorities)]bool
	for _, w := range d.waiting {
		if w.tenant == tenant {
			present[w.class] = true
		}
	}
	d.of(tenant).begun(class, present)
}

// give gives a slot back.
func (d *desk) give() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.free++
	d.serve()
}

// of is the precedence of a tenant's jobs, under the lock.
func (d *desk) of(tenant string) *precedence {
	q := d.by[tenant]
	if q == nil {
		if len(d.by) >= maxTenants {
			clear(d.by)
			clear(d.turn)
		}
		q = &precedence{}
		d.by[tenant] = q
	}
	return q
}

// serve gives free slots to those that wait, under the lock.
func (d *desk) serve() {
	for d.free > 0 && len(d.waiting) > 0 {
		next := d.waiting[0]
		for _, w := range d.waiting[1:] {
			if d.turn[w.tenant] < d.turn[next.tenant] {
				next = w
			}
		}
		classes := d.of(next.tenant).order()
		for _, w := range d.waiting {
			if w.tenant == next.tenant && slices.Index(classes[:], w.class) < slices.Index(classes[:], next.class) {
				next = w
			}
		}
		d.waiting = slices.Delete(d.waiting, slices.Index(d.waiting, next), slices.Index(d.waiting, next)+1)
		d.free--
		d.given++
		d.turn[next.tenant] = d.given
		close(next.slot)
	}
}
