package clientsim

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto"
)

// This file has clients change names that all of them follow. Checked are: what a follower returns is never of an earlier revision than what it
// has returned before; a change that was acknowledged more than nameBound ago is known to it; and when the faults have ended, it has what the
// controllers answer. Beside that they replace a tree, and put keys into the tree that its name stands for: none is put into one that was replaced more than
// nameBound ago.

const (
	sharedNames = 4 // the last one is also deleted
	// nameBound is above what client.FollowedName.Entry promises, with the time that a process stands still inside it.
	nameBound = 11 * time.Second
)

// nameWork are the names, with Options.Names.
type nameWork struct {
	mu        sync.Mutex
	changes   [sharedNames][]nameChange        // acknowledged, in the order of the acknowledgements
	followers map[*client.Client]*nameFollower // of the processes that have one
	former    map[client.Ref]time.Time         // roots of trees that were replaced: when that was acknowledged
}

// nameChange is a change that was acknowledged.
type nameChange struct {
	revision uint64
	at       time.Time
}

// nameFollower follows all names in one process.
type nameFollower struct {
	turn  chan struct{} // of capacity 1, held by one look at a time: time goes on for those who wait
	names [sharedNames]*client.FollowedName
	last  [sharedNames]uint64 // revision that was returned last
	tree  *kv.Named           // of replacedTree; nil: not opened yet
}

func sharedName(i int) string { return fmt.Sprintf("shared/%d", i) }

// nameOp changes a name, or looks at what is followed.
func (r *run) nameOp(w *worker, l *incarnation) {
	i := r.intn(sharedNames)
	switch n := r.intn(10); {
	case r.chance(4):
		r.putByName(w, l)
	case r.chance(40):
		r.replaceTree(w, l)
	case n < 5:
		r.lookAtName(w, l, i)
	case n == 9 && i == sharedNames-1:
		_ = w.call(r.ctx, l, "delete name", func(ctx context.Context) error { return l.cl.Names().Delete(ctx, sharedName(i), 0) })
	default:
		r.changeName(w, l, i)
	}
}

// changeName changes a name, or makes it if it is not there.
func (r *run) changeName(w *worker, l *incarnation, i int) {
	names := l.cl.Names()
	var now client.Name
	err := w.call(r.ctx, l, "change name", func(ctx context.Context) (err error) {
		ref := client.Ref{Addr: proto.MakeAddr(1, 4096), Incarnation: proto.MakeIncarnation(0, 1+r.h.value()%1000)}
		e, err := names.Lookup(ctx, sharedName(i))
		switch {
		case errors.Is(err, client.ErrNoName):
			now, err = names.Create(ctx, sharedName(i), "object", ref)
		case err == nil:
			e.Ref = ref
			now, err = names.Change(ctx, e)
		}
		return err
	})
	if err == nil {
		r.count(&r.Counts.Names)
		r.names.mu.Lock()
		defer r.names.mu.Unlock()
		r.names.changes[i] = append(r.names.changes[i], nameChange{now.Revision, time.Now()})
	}
}

// replacedTree is the name of the tree that is replaced.
const replacedTree = "replaced"

// putByName puts a key into the tree that the name stands for.
func (r *run) putByName(w *worker, l *incarnation) {
	f := r.follower(l)
	f.turn <- struct{}{}
	if f.tree == nil {
		_ = w.call(r.ctx, l, "open named", func(ctx context.Context) (err error) {
			f.tree, err = kv.OpenNamed(ctx, l.cl, replacedTree, btree.Config{})
			return err
		})
	}
	named := f.tree
	<-f.turn
	if named == nil {
		return
	}
	var began time.Time
	var root client.Ref
	err := w.call(r.ctx, l, "put by name", func(ctx context.Context) error {
		t, err := named.Tree(ctx)
		if err != nil {
			return err
		}
		began, root = time.Now(), t.Root()
		return t.Put(ctx, []byte(r.anyKey()), payload(r.h.value(), 40))
	})
	if err != nil {
		return
	}
	r.count(&r.Counts.NamedPuts)
	r.names.mu.Lock()
	defer r.names.mu.Unlock()
	if at, ok := r.names.former[root]; ok && at.Before(began.Add(-nameBound)) {
		r.fail("%s: a key was put into a tree that was replaced %v before", l.name, began.Sub(at))
	}
}

// replaceTree has the name stand for another tree, and frees the former one.
func (r *run) replaceTree(w *worker, l *incarnation) {
	owner := fmt.Sprint("job ", r.h.value())
	var former client.Ref
	if w.call(r.ctx, l, "replace", func(ctx context.Context) error {
		if _, err := kv.Stage(ctx, l.cl, replacedTree, owner); err != nil {
			return err
		}
		e, err := l.cl.Names().Lookup(ctx, replacedTree)
		if err == nil {
			former = e.Ref
			err = kv.Commit(ctx, l.cl, replacedTree, owner)
		}
		return err
	}) == nil {
		r.names.mu.Lock()
		if r.names.former == nil {
			r.names.former = map[client.Ref]time.Time{}
		}
		r.names.former[former] = time.Now()
		r.names.mu.Unlock()
		r.count(&r.Counts.Replaced)
	}
	_ = w.call(r.ctx, l, "settle", func(ctx context.Context) error { return kv.Settle(ctx, l.cl, replacedTree, owner) })
}

// follower is that of a process; nil until it follows all names.
func (r *run) follower(l *incarnation) *nameFollower {
	r.names.mu.Lock()
	defer r.names.mu.Unlock()
	if f := r.names.followers[l.cl]; f != nil {
		return f
	}
	if r.names.followers == nil {
		r.names.followers = map[*client.Client]*nameFollower{}
	}
	f := &nameFollower{turn: make(chan struct{}, 1)}
	r.names.followers[l.cl] = f
	return f
}

// lookAtName compares what a follower returns with what was acknowledged.
func (r *run) lookAtName(w *worker, l *incarnation, i int) {
	f := r.follower(l)
	f.turn <- struct{}{}
	defer func() { <-f.turn }()
	if f.names[i] == nil {
		if err := w.call(r.ctx, l, "follow", func(ctx context.Context) (err error) {
			f.names[i], err = l.cl.Names().Follow(ctx, sharedName(i))
			return err
		}); err != nil {
			return
		}
	}
	until := time.Now().Add(-nameBound)
	e, err := f.names[i].Entry()
	if err != nil && !errors.Is(err, client.ErrNoName) {
		return
	}
	r.count(&r.Counts.Entries)
	if e.Revision != 0 {
		if e.Revision < f.last[i] {
			r.fail("%s: name %d: revision %d follows %d", l.name, i, e.Revision, f.last[i])
		}
		f.last[i] = e.Revision
	}
	if i == sharedNames-1 && e.Revision == 0 {
		return // deleted
	}
	r.names.mu.Lock()
	defer r.names.mu.Unlock()
	for _, c := range r.names.changes[i] {
		if c.at.Before(until) && c.revision > e.Revision {
			r.fail("%s: name %d: the follower is at revision %d; %d was acknowledged %v ago", l.name, i, e.Revision, c.revision, time.Since(c.at))
		}
	}
}

// settleNames waits until each process that lives has what the controllers have.
func (r *run) settleNames(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for _, w := range r.workers {
		cl := w.now().cl
		f := r.names.followers[cl]
		if cl == nil || f == nil {
			continue
		}
		for i, n := range f.names {
			if n == nil {
				continue
			}
			for why := ""; ; {
				want, werr := cl.Names().Lookup(ctx, sharedName(i))
				has, err := n.Entry()
				if has.Revision == want.Revision && (err == nil || errors.Is(err, client.ErrNoName)) && (werr == nil || errors.Is(werr, client.ErrNoName)) {
					break
				}
				if ctx.Err() == nil {
					why = fmt.Sprintf("it has %d (%v), the controllers have %d (%v)", has.Revision, err, want.Revision, werr)
				}
				if r.pause(ctx, 200*time.Millisecond) != nil {
					r.fail("client%d has missed a change of name %d: %s", w.id, i, why)
					break
				}
			}
		}
		if f.tree != nil {
			if err := r.again(ctx, func() error { return f.putAtEnd(ctx, cl) }); err != nil {
				r.fail("client%d does not work in the tree that the name stands for: %v", w.id, err)
			}
			f.tree.Close()
		}
		r.World.mu.Lock()
		r.Counts.NameLate += cl.Stats().Names.Late
		r.World.mu.Unlock()
	}
}

var errFormerTree = errors.New("the tree is not the one that the name stands for")

// putAtEnd puts a key into the tree, which must be the one that the controllers name.
func (f *nameFollower) putAtEnd(ctx context.Context, cl *client.Client) error {
	e, err := cl.Names().Lookup(ctx, replacedTree)
	if err != nil {
		return err
	}
	t, err := f.tree.Tree(ctx)
	if err == nil && t.Root() != e.Ref {
		err = errFormerTree
	}
	if err == nil {
		err = t.Put(ctx, []byte("end"), []byte("end"))
	}
	return err
}
