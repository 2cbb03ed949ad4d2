package main

import (
	"bufio"
	"context"
	"errors"
	"io"
	"strconv"
	"sync"

	"github.com/quarrystore/quarry/btree/kv"
)

// followAcks are the positions on standard input.
type followAcks struct {
	wake chan struct{} // of capacity 1: there is something new

	mu    sync.Mutex
	last  uint64 // guarded by mu, as what follows
	ended bool   // no more come
	err   error  // why
}

// readAcks begins to read positions. Its goroutine ends with the input.
func readAcks(in io.Reader) *followAcks {
	k := &followAcks{wake: make(chan struct{}, 1)}
	go func() {
		lines, n := bufio.NewScanner(in), 0
		for lines.Scan() {
			n++
			position, err := strconv.ParseUint(lines.Text(), 10, 64)
			if err != nil {
				k.add(0, true, usagef("--acks: standard input, line %d: %q is no position", n, lines.Text()))
				return
			}
			k.add(position, false, nil)
		}
		k.add(0, true, lines.Err())
	}()
	return k
}

func (k *followAcks) add(position uint64, ended bool, err error) {
	k.mu.Lock()
	k.last, k.ended, k.err = max(k.last, position), ended, err
	k.mu.Unlock()
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

func (k *followAcks) now() (position uint64, ended bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.last, k.ended, k.err
}

// acknowledged prints the events of a feed, and acknowledges positions as they are read.
func (x *kvFollowCmd) acknowledged(ctx context.Context, a *app, feed *kv.Feed, out *kvFollowOut, acks *followAcks) error {
	before := out.last // by another feed, whose events come again if they were not acknowledged
	for {
		position, over, aerr := acks.now()
		if position > before {
			octx, cancel := a.one(context.WithoutCancel(ctx))
			err := feed.Ack(octx, position)
			cancel()
			if err != nil {
				return err
			}
		}
		switch {
		case over:
			out.ended = true
			return aerr
		case out.ended && (out.last == before || feed.Acknowledged() >= out.last):
			return nil
		case out.ended:
			select {
			case <-acks.wake:
				continue
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		nctx, cancel := context.WithCancel(ctx)
		woken := make(chan struct{})
		go func() {
			defer close(woken)
			select {
			case <-acks.wake:
				cancel()
			case <-nctx.Done():
			}
		}()
		err := x.next(ctx, nctx, a, feed, out)
		if errors.Is(err, kv.ErrPending) {
			<-woken // by a position, or because ctx has ended
			err = ctx.Err()
		}
		cancel()
		<-woken
		if err != nil {
			return err
		}
	}
}
