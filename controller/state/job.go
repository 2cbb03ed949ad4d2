package state

import (
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
)

// This file runs jobs: sequences of steps, each of which calls some agents and ends when all have
// succeeded.

// job is work with agents that takes several steps. A step is a set of calls (legs), a gate that
// must be open, and what follows when all legs are done.
type job struct {
	a       *agents
	regions []*region   // that it works on; their field job leads here
	waiters []uint64    // of the requests that its end answers
	began   int64       // ns
	legs    []*leg      // of the present step
	then    func()      // when every leg is done
	gate    func() bool // until it is true no leg is started; nil: open
	// give: the job fails as soon as a leg is refused, or not answered for createPatience.
	// Without it legs are repeated until the region's configuration changes, which ends the job.
	give bool
	fail func(*Error) // of a job with give: called once, when no leg is out any more
	quit func()       // called when the job ends, in any way; nil: nothing
	err  *Error       // why a job with give is failing
	over bool         // it has ended: answers are ignored
}

// leg is one call of a job.
type leg struct {
	n       *node         // whose agent is called
	msg     proto.Message // the request
	timeout time.Duration // of one try
	// more says of an answer that the call has to be made again at once; nil: never.
	more func(proto.Message) bool
	// waive says that the call need not succeed any more; nil: it must.
	waive func() bool
	out   bool  // under way
	done  bool  // has succeeded, or is waived
	next  int64 // ns; no try before
}

// newJob begins a job on regions. Its first step follows.
func (a *agents) newJob(regions []*region) *job {
	j := &job{a: a, regions: regions, began: a.m.now}
	a.jobs = append(a.jobs, j)
	for _, g := range regions {
		g.job = j
	}
	return j
}

// step sets the job's next calls. Preconditions: those before are done.
func (j *job) step(legs []*leg, then func()) {
	j.legs, j.then = legs, then
	j.a.dirty = true
}

// end takes the job out. Replies to its calls are ignored from now on.
func (j *job) end() {
	if j.over {
		return
	}
	j.over = true
	if j.quit != nil {
		defer j.quit()
	}
	j.a.jobs = slices.DeleteFunc(j.a.jobs, func(o *job) bool { return o == j })
	for _, g := range j.regions {
		if g.job == j {
			g.job = nil
		}
	}
}

// abort fails a job that can fail.
func (j *job) abort(err *Error) {
	if j.err == nil {
		j.err = err
	}
	j.a.dirty = true
}

// advance starts the legs that are due, and continues with the next step when all are done.
func (j *job) advance() {
	if j.over || j.legs == nil && j.then == nil && j.err == nil {
		return
	}
	if j.err != nil {
		if !slices.ContainsFunc(j.legs, func(l *leg) bool { return l.out }) {
			j.end()
			j.fail(j.err)
		}
		return
	}
	if j.gate != nil && !j.gate() {
		if j.give && j.a.m.now-j.began > int64(createPatience+hostTimeout) {
			j.abort(errorf(Busy, "storage nodes do not acknowledge fences; try again"))
		}
		return
	}
	waiting := false
	for _, l := range j.legs {
		if !l.done && l.waive != nil {
			l.done = l.waive()
		}
		if !l.done {
			waiting = true
			if !l.out && j.a.m.now >= l.next {
				j.start(l)
			}
		}
	}
	if !waiting {
		then := j.then
		j.legs, j.then, j.gate = nil, nil, nil
		then()
	}
}

// start makes the call of a leg.
func (j *job) start(l *leg) {
	l.out = true
	j.a.call(l.n, l.msg, l.timeout, func(r Reply) {
		l.out = false
		if j.over {
			return
		}
		j.a.dirty = true
		switch {
		case r.Err == nil && l.more != nil && l.more(r.Msg):
		case r.Err == nil:
			l.done = true
		case j.give && r.NoSpace:
			l.n.fullUntil = j.a.m.now + refusedFor
			j.abort(errorf(Exhausted, "node %s: %v", l.n.rec.Name, r.Err))
		case j.give && (r.Refused || j.a.m.now-j.began > int64(createPatience)):
			j.abort(errorf(Precondition, "node %s: %v", l.n.rec.Name, r.Err))
		default:
			l.next = j.a.m.now + int64(retryAfter)
		}
	})
}
