package redis

import (
	"context"
	"time"

	"github.com/quarrystore/quarry/btree/kv"
)

// This file has a gateway go on with another tree, when the name of its tree stands for that one. Whatever a connection has of the former tree, such as cursors
// and keys that its client keeps, means nothing in the new one. So the connections of the former tree are closed; clients connect again.

// Pauses between two tries to open the tree that was put in place of the former one. Commands fail meanwhile.
const (
	firstReopen = 10 * time.Millisecond
	lastReopen  = time.Second
)

// Tree is the one that users without grants use.
func (s *Server) Tree() *kv.Tree { return s.base.Load().tree.Tree }

// tend sweeps the tree, and those that follow it under its name, until ctx ends.
func (s *Server) tend(ctx context.Context) {
	for now := s; now != nil; {
		tctx, stop := context.WithCancel(ctx)
		if s.cfg.SweepKeys > 0 {
			s.wg.Go(func() { now.sweep(tctx) })
		}
		gone := now.tree.Replaced()
		if s.cfg.Reopen == nil {
			gone = nil
		}
		select {
		case <-gone:
		case <-ctx.Done():
		}
		stop()
		now = now.successor(ctx)
	}
}

// successor is the gateway to the tree that the name stands for now; nil: ctx has ended before it was opened.
func (s *Server) successor(ctx context.Context) *Server {
	told := false
	for pause := firstReopen; ctx.Err() == nil; pause = min(2*pause, lastReopen) {
		tree, err := s.cfg.Reopen(ctx)
		if err == nil {
			next := s.over(tree)
			s.cfg.Logger.Warn("gateway: the tree was replaced; its connections are closed", "tree", tree.Name(), "former", s.tree.Root(), "root", tree.Root())
			s.handOver(next)
			return next
		}
		if !told && ctx.Err() == nil {
			s.cfg.Logger.Warn("gateway: the tree was replaced or dropped, and the name's tree cannot be opened: commands fail until it can", "tree", s.tree.Name(), "error", err)
			told = true
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
	return nil
}

// handOver has new connections use the next tree, and ends those of this one.
func (s *Server) handOver(next *Server) {
	if events := s.feed.notify.Load(); events != 0 {
		next.feed.notify.Store(events)
		if err := next.feed.start(); err != nil {
			s.cfg.Logger.Warn("gateway: events of keys are not published any more", "error", err)
		}
	}
	s.base.Store(next)
	s.endConnections(s)
}

// endConnections ends the connections of a tree that was replaced. A command that runs has no answer then, as if the network had failed.
func (s *Server) endConnections(of *Server) {
	of.replaced.Store(true)
	var list []*conn
	s.mu.Lock()
	for _, c := range s.conns {
		if c.home.Load() == of {
			list = append(list, c)
		}
	}
	s.mu.Unlock()
	for _, c := range list {
		c.pushes.hangUp()
	}
}
