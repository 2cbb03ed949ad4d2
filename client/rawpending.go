package client

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// pendingRaw are sessions of a Client that have ended with a change of a raw region whose answer is lost: its verbs may still be on their way. Words of slabs are
// reserved by a session until it is fenced, plain bytes are not. So the Client's next changes of the region wait for that fence.
//
// Invariant: no verb that the Client has posted to a raw region under a session before runs behind the answer to a change of that region.
type pendingRaw struct {
	some atomic.Bool // of is not empty
	mu   sync.Mutex
	of   map[uint32][]Session // by region; of each session once, until it is fenced there
}

// rawPlace is where a call changes raw regions: in those of its pieces, or in one.
type rawPlace struct {
	pieces []RawPiece
	region uint32
}

// regions calls f for each region, some more than once, until it returns false.
func (p rawPlace) regions(f func(region uint32) bool) {
	if p.pieces == nil {
		f(p.region)
		return
	}
	for i := range p.pieces {
		if !f(p.pieces[i].Region) {
			return
		}
	}
}

// add notes that verbs of a session may still change the regions of a call.
func (p *pendingRaw) add(at rawPlace, s Session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of == nil {
		p.of = map[uint32][]Session{}
	}
	at.regions(func(region uint32) bool {
		if !slices.Contains(p.of[region], s) {
			p.of[region] = append(p.of[region], s)
		}
		return true
	})
	p.some.Store(len(p.of) > 0)
}

// first is a session whose verbs may still change a region of a call.
func (p *pendingRaw) first(at rawPlace) (region uint32, s Session, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at.regions(func(r uint32) bool {
		if all := p.of[r]; len(all) > 0 {
			region, s, ok = r, all[0], true
		}
		return !ok
	})
	return region, s, ok
}

// drop forgets a session that is fenced in a region.
func (p *pendingRaw) drop(region uint32, s Session) {
	p.mu.Lock()
	defer p.mu.Unlock()
	left := slices.DeleteFunc(p.of[region], func(x Session) bool { return x == s })
	if p.of[region] = left; len(left) == 0 {
		delete(p.of, region)
	}
	p.some.Store(len(p.of) > 0)
}

// awaitPending returns when no verb of a former session of the Client changes a region of the call any more. An error: nothing was changed.
func (l *lane) awaitPending(at rawPlace) error {
	p := &l.session.client.pendingRaw
	if !p.some.Load() {
		return nil
	}
	if l.park() {
		defer l.unpark()
	}
	for attempt := 1; ; attempt++ {
		region, s, ok := p.first(at)
		if !ok {
			return nil
		}
		if l.session.view.Load().table.Region(region) == nil || l.isPast(region, s) {
			p.drop(region, s)
			continue
		}
		if err := l.backOff(attempt); err != nil {
			return fmt.Errorf("%w: a change of region %d under session %d, which has ended, may still arrive: %w", ErrBusy, region, s.Number, err)
		}
	}
}

// pastWaitMs is how long a controller may wait for a fence.
const pastWaitMs = 100

// isPast asks a controller whether a former session of the Client is fenced in a region.
func (l *lane) isPast(region uint32, s Session) bool {
	mine := l.session.ticket
	if s.Number == mine.Session {
		return true // a number is given again behind the fence
	}
	ctx, cancel := l.withTimeout()
	defer cancel()
	var res *quarrypb.CertifyFenceResponse
	q := &quarrypb.CertifyFenceRequest{Serial: mine.Serial, Proof: l.session.shown.Load().proof, Region: region, Session: s.Number, Target: s.Serial, WaitMs: pastWaitMs}
	err := l.session.client.control.do(ctx, usual, tryOf(&res, q, quarrypbconnect.ControllerClient.CertifyFence))
	return err == nil && res.Fenced
}

// notePending notes that verbs of a call which has ended with err may still run.
func (l *lane) notePending(at rawPlace, err error) {
	if errors.Is(err, ErrUnknown) && l.session.err() != nil { // else they are settled
		l.session.client.pendingRaw.add(at, Session{l.session.ticket.Session, l.session.ticket.Serial})
	}
}
