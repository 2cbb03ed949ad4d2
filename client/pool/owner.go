package pool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/contexts"
)

// NameKind is the kind of a pool's name.
const NameKind = "pool"

// noteKey is the note of the name's entry with the state of the pool.
const noteKey = "pool"

// States of a pool.
const (
	Making   = "making"   // Create has not returned
	Ready    = "ready"    // it can be opened
	Removing = "removing" // Remove has begun
)

// note is the state of a pool. Each change of it is one change of the name's entry.
type note struct {
	State string         `json:"state"`
	Space string         `json:"space"`           // another one for each Create of the name
	Owner client.Session `json:"owner"`           // Serial 0: nobody has it open
	Token string         `json:"token,omitempty"` // of the call that took it, for sessions that try twice
	Dirty bool           `json:"dirty,omitempty"` // it was not closed in order, or a Persist failed
	Torn  bool           `json:"torn,omitempty"`  // a Sync by a Memory has not returned, or a Persist has failed: it may have later Persists and not earlier ones
	Last  string         `json:"last,omitempty"`  // who may have written it last: the token of a Memory, or of the call that took it
}

// lookup finds a pool.
func lookup(ctx context.Context, c *client.Client, name string) (e client.Name, n note, err error) {
	if e, err = c.Names().Lookup(ctx, name); err != nil {
		return e, n, err
	}
	if e.Kind != NameKind {
		return e, n, fmt.Errorf("%w: name %q is of a %s", ErrNotPool, name, e.Kind)
	}
	if err = json.Unmarshal([]byte(e.Notes[noteKey]), &n); err != nil {
		return e, n, fmt.Errorf("%w: name %q: its note is damaged: %w", ErrNotPool, name, err)
	}
	return e, n, nil
}

// with is the entry with another state.
func (n note) with(e client.Name) client.Name {
	b, err := json.Marshal(n)
	if err != nil {
		panic(err) // plain data
	}
	e.Notes = maps.Clone(e.Notes)
	if e.Notes == nil {
		e.Notes = map[string]string{}
	}
	e.Notes[noteKey] = string(b)
	return e
}

// claim is the ownership of a pool by a session.
type claim struct {
	c     *client.Client
	bound context.Context // its calls change memory under the session alone
	end   context.CancelFunc
	me    client.Session
	e     client.Name // as it was last read or changed
	n     note
	keep  bool // take leaves note.Last, because the owner does not write before own
}

// bind begins a claim under the Client's session. The claim is nobody's yet.
func bind(ctx context.Context, c *client.Client) (*claim, error) {
	k := &claim{c: c}
	// The caller's context bounds Create and Open, not the use of the pool.
	long, end := context.WithCancel(context.WithoutCancel(ctx))
	var err error
	if k.bound, k.me, err = c.Bind(long); err != nil {
		end()
		return nil, err
	}
	k.end = end
	return k, nil
}

// within is ctx for calls that change memory under the claim's session alone.
func (k *claim) within(ctx context.Context) (context.Context, context.CancelFunc) {
	return contexts.Both(k.bound, ctx)
}

// tidyTimeout bounds what a call does behind its own end: to find out what it has done, and to give back what it has taken.
const tidyTimeout = 10 * time.Second

// tidy is a context for that.
func (k *claim) tidy() (context.Context, context.CancelFunc) {
	return context.WithTimeout(k.bound, tidyTimeout)
}

// because adds to an error that the session has ended, if it has: calls tell then that their context has.
func (k *claim) because(err error) error {
	if err != nil && k.bound.Err() != nil {
		return fmt.Errorf("%w: %w", context.Cause(k.bound), err)
	}
	return err
}

// take makes the claim's session the owner of a pool as lookup has found it, and gives it a state. ErrOpen: another session, or another call of
// this one, has it.
func (k *claim) take(ctx context.Context, e client.Name, n note, state string) error {
	if n.Owner.Serial != 0 {
		if n.Owner.Serial == k.me.Serial {
			return fmt.Errorf("%w: pool %q, by this client", ErrOpen, e.Name)
		}
		// The controllers give a number to a later session only when the former one is fenced.
		fenced := n.Owner.Number == k.me.Number && n.Owner.Serial < k.me.Serial
		if !fenced {
			var err error
			if fenced, err = k.c.Fenced(ctx, n.Owner); err != nil {
				return fmt.Errorf("pool %q: %w", e.Name, err)
			}
		}
		if !fenced {
			return fmt.Errorf("%w: pool %q, by session %d", ErrOpen, e.Name, n.Owner.Number)
		}
		n.Dirty = true
	}
	n.Owner, n.Token, n.State = k.me, newToken(), state
	if !k.keep {
		n.Last = n.Token
	}
	k.e = e
	err := k.change(ctx, n)
	if errors.Is(err, client.ErrConflict) {
		return fmt.Errorf("%w: pool %q, at this moment", ErrOpen, e.Name)
	}
	return err
}

// change gives the pool another note if its entry is as the claim has it.
// Linearizes at: the change of the entry, by the controllers.
func (k *claim) change(ctx context.Context, n note) error {
	ctx, cancel := k.within(ctx)
	defer cancel()
	e, err := k.c.Names().Change(ctx, n.with(k.e))
	if errors.Is(err, client.ErrUnknown) {
		e, err = k.settle(ctx, n, err)
	}
	if err == nil {
		k.e, k.n = e, n
	}
	return k.because(err)
}

// settle finds out whether a change to n was made whose answer was lost. If the entry is as it was, settle gives it the
// same contents and so another revision: the controllers refuse the lost change then, should it still reach them. ctx is
// the caller's.
func (k *claim) settle(ctx context.Context, n note, lost error) (client.Name, error) {
	tidy, cancel := k.tidy()
	defer cancel()
	for range 2 { // the lost change may arrive between the look-up and the second change
		e, now, err := lookup(tidy, k.c, k.e.Name)
		if err != nil {
			return client.Name{}, lost
		}
		if now == n {
			return e, nil
		}
		if e.Revision != k.e.Revision {
			return client.Name{}, lost
		}
		if e, err = k.c.Names().Change(tidy, e); err == nil {
			k.e = e
			if ctx.Err() != nil {
				return client.Name{}, fmt.Errorf("pool %q was not changed: %w", e.Name, context.Cause(ctx))
			}
			return client.Name{}, fmt.Errorf("pool %q was not changed: %v", e.Name, lost) // %v: the outcome is known
		}
		if !errors.Is(err, client.ErrConflict) {
			return client.Name{}, lost
		}
	}
	return client.Name{}, lost
}

// own makes a token that of the pool's last writer. It can be called again. If the entry has another revision and is the claim's still, an earlier
// request of this owner has arrived whose answer was lost: own goes on from that revision.
func (k *claim) own(ctx context.Context, token string, torn bool) error {
	for {
		n := k.n
		n.Last, n.Torn = token, torn
		err := k.change(ctx, n)
		if !errors.Is(err, client.ErrConflict) {
			return err
		}
		e, now, lerr := lookup(ctx, k.c, k.e.Name)
		if lerr != nil {
			return lerr
		}
		if now.Owner != k.me || now.Token != k.n.Token || e.Revision == k.e.Revision {
			return err
		}
		k.e, k.n = e, now
	}
}

// release gives the pool up. It can be called again.
func (k *claim) release(ctx context.Context, dirty bool) error {
	n := k.n
	n.Owner, n.Token, n.Dirty = client.Session{}, "", dirty
	for {
		err := k.change(ctx, n)
		if !errors.Is(err, client.ErrConflict) {
			return err
		}
		// The entry has another revision, or another owner since a release whose answer was lost.
		e, now, lerr := lookup(ctx, k.c, k.e.Name)
		if errors.Is(lerr, client.ErrNoName) || lerr == nil && now.Token != k.n.Token {
			return nil
		}
		if lerr != nil {
			return lerr
		}
		k.e, n.State = e, now.State
	}
}

// giveBack is release behind a call that has failed with err, whose context may have ended.
func (k *claim) giveBack(err error, dirty bool) error {
	ctx, cancel := k.tidy()
	defer cancel()
	if rerr := k.release(ctx, dirty); rerr != nil {
		return fmt.Errorf("%w: the client's session may have pool %q until it ends: %w", client.ErrUnknown, k.e.Name, errors.Join(err, rerr))
	}
	return err
}
