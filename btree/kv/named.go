package kv

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// ErrReplaced: the name stands for another tree than the one that was used, or for none. The call has changed nothing. It is also a
// btree.ErrNoTree.
var ErrReplaced = fmt.Errorf("the tree was replaced or dropped: its name does not stand for it any more: %w", btree.ErrNoTree)

// Named is a name with the tree that it stands for. A tree is replaced (Commit; Names.Change), or dropped and made again, while programs
// have it open: those that opened it by Open go on to read and to change what the name does not stand for any more, and what they write there is lost. The
// controllers push the change of a name to each Named (client.Names.Follow). From then on calls of the former Tree fail with ErrReplaced, and
// Named.Tree opens the new one.
//
// The push follows the change, and nobody waits for it: a write that ends in between is done, in the former tree. So stop the writers before a tree with
// writers is replaced, or have them write to both.
//
// A Tree stays the same tree, because versions of one tree mean nothing in another: a program that compares versions uses one Tree for all its steps.
//
// Safe for many goroutines.
type Named struct {
	c      *client.Client
	name   string
	cfg    btree.Config
	follow *client.FollowedName
	end    context.CancelFunc // of watch
	ended  chan struct{}      // closed when watch has ended

	turn chan struct{} // of capacity 1: held by who opens a tree
	mu   sync.Mutex    // guards tree
	tree *Tree         // the last one that was opened
	// replaced counts trees that the name has ceased to stand for.
	replaced atomic.Uint64
}

// holding is the hold of a tree on its name.
type holding struct {
	ctx    context.Context // ends when the name does not stand for the tree any more
	lose   context.CancelFunc
	follow *client.FollowedName
	// denied is why the name may not be read any more, so that nobody tells whether it stands for the tree; nil: it may.
	denied atomic.Pointer[error]
}

// err is why the tree must not be used; nil: it may be. A nil holding has none.
func (h *holding) err() error {
	if h == nil {
		return nil
	}
	if h.ctx.Err() != nil {
		return ErrReplaced
	}
	if p := h.denied.Load(); p != nil {
		return *p
	}
	return h.follow.Doubt()
}

// OpenNamed opens the tree with a name, and keeps up with the name until Close.
//
// Errors: those of Open and of client.Names.Follow.
func OpenNamed(ctx context.Context, c *client.Client, name string, cfg btree.Config) (*Named, error) {
	follow, err := c.Names().Follow(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("open tree: %w", err)
	}
	wctx, end := context.WithCancel(context.WithoutCancel(ctx))
	n := &Named{c: c, name: name, cfg: cfg, follow: follow, end: end, ended: make(chan struct{}), turn: make(chan struct{}, 1)}
	go n.watch(wctx)
	if _, err := n.Tree(ctx); err != nil {
		n.Close()
		return nil, err
	}
	return n, nil
}

// Tree is the tree that the name stands for, as the controllers have pushed last. It opens the tree if that is another one than before.
//
// Errors: those of Open; those of client.FollowedName.Entry.
func (n *Named) Tree(ctx context.Context) (*Tree, error) {
	select {
	case n.turn <- struct{}{}:
		defer func() { <-n.turn }()
	case <-ctx.Done():
		return nil, fmt.Errorf("open tree %q: %w", n.name, ctx.Err())
	}
	for {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("open tree %q: %w", n.name, err)
		}
		e, err := n.follow.Entry()
		if err == nil && e.Kind != NameKind {
			err = fmt.Errorf("%q is of kind %q: %w", n.name, e.Kind, ErrNotTree)
		}
		if err != nil {
			return nil, fmt.Errorf("open tree: %w", err)
		}
		n.mu.Lock()
		t := n.tree
		n.mu.Unlock()
		if t != nil && t.Root() == e.Ref && t.store.held.ctx.Err() == nil {
			return t, nil
		}
		t, err = attach(ctx, n.c, e, n.cfg)
		now, nerr := n.follow.Entry()
		if nerr != nil || now.Ref != e.Ref {
			continue // changed meanwhile: what was opened, or why it was not, says nothing
		}
		if err != nil {
			return nil, err
		}
		h := &holding{follow: n.follow}
		h.ctx, h.lose = context.WithCancel(context.Background())
		t.store.held = h
		n.mu.Lock()
		if n.tree != nil {
			n.lose(n.tree.store.held) // watch may not have seen the change, and will look at t
		}
		n.tree = t
		n.mu.Unlock()
		n.look() // the entry may have changed since
	}
}

// watch looks at the name whenever it may have changed.
func (n *Named) watch(ctx context.Context) {
	defer close(n.ended)
	for {
		n.look()
		select {
		case <-n.follow.Changed():
		case <-n.follow.Done(): // the client is closed
			return
		case <-ctx.Done():
			return
		}
	}
}

// lose ends the hold of a tree. mu is held.
func (n *Named) lose(h *holding) {
	if h.ctx.Err() == nil {
		n.replaced.Add(1)
		h.lose()
	}
}

// look ends the hold of the open tree if the name stands for another one.
func (n *Named) look() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.tree == nil {
		return
	}
	h := n.tree.store.held
	switch e, err := n.follow.Entry(); {
	case err == nil && e.Kind == NameKind && e.Ref == n.tree.Root():
		h.denied.Store(nil)
	case err == nil, errors.Is(err, client.ErrNoName):
		n.lose(h)
	case errors.Is(err, client.ErrClosed), errors.Is(err, client.ErrUnreachable): // holding.err sees the latter
	default:
		h.denied.Store(&err)
	}
}

// Replaced counts the trees that the name has ceased to stand for.
func (n *Named) Replaced() uint64 { return n.replaced.Load() }

// Close ends the following of the name. Trees that are open stay open, whatever the name stands for.
func (n *Named) Close() {
	n.end()
	<-n.ended
	n.follow.Close()
}

// Replaced is closed when the name of a tree of a Named does not stand for the tree any more. Of other trees it is nil.
func (t *Tree) Replaced() <-chan struct{} {
	if t.store.held == nil {
		return nil
	}
	return t.store.held.ctx.Done()
}
