package pager

import (
	"context"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
)

// roundPages is how many pages one round writes back.
const roundPages = client.MaxRawBytes / pageBytes

// evict writes back the dirty ones of the caller's frames and gives the memory of all that are clean then back. Those that could not be written, or given back,
// stay; an error: all of them.
func (s *Server) evict(ctx context.Context, frames []*frame) error {
	err := s.writeBack(ctx, frames)
	var clean, kept []*frame
	for _, f := range frames {
		if s.isDirty(f) {
			kept = append(kept, f)
		} else {
			clean = append(clean, f)
		}
	}
	if len(kept) > 0 {
		s.cache.release(kept...)
	}
	freed := 0
	for _, r := range runs(clean, roundPages) {
		if ferr := s.forget(r); ferr != nil {
			err = errors.Join(err, ferr)
			continue
		}
		freed += len(r)
	}
	s.count.evicted.Add(uint64(freed))
	if freed > 0 {
		return nil
	}
	return fmt.Errorf("no memory could be freed: %w", err)
}

func (s *Server) isDirty(f *frame) bool {
	s.cache.mu.Lock()
	defer s.cache.mu.Unlock()
	return f.dirty
}

// forget gives the memory of pages back and drops their frames. If that fails, they stay as they are.
// Preconditions: the frames are the caller's, and no byte of the pages is needed.
func (s *Server) forget(r run) error {
	if len(r) == 0 {
		return nil
	}
	err := r[0].of.punch(r.first(), uint64(len(r)))
	c := s.cache
	c.mu.Lock()
	for _, f := range r {
		if err != nil { // it stays, as it is
			f.busy = false
			continue
		}
		c.drop(f)
	}
	c.mu.Unlock()
	c.freed.Broadcast()
	if err != nil && r[0].of.stuck.CompareAndSwap(false, true) { // once, and not at each attempt
		s.cfg.Logger.Error("memory of pages was not given back", "space", r[0].of.id.Name, "reason", err)
	}
	return err
}

// writeBack writes the dirty ones of frames into the space, a round for roundPages of them, and where that fails one for those of each region. They are clean then,
// or, where their round has failed, as dirty as before.
// Preconditions: the frames are the caller's.
func (s *Server) writeBack(ctx context.Context, frames []*frame) error {
	var dirty []*frame
	for _, f := range frames {
		if s.isDirty(f) {
			dirty = append(dirty, f)
		}
	}
	var errs []error
	var round []run
	pages := 0
	flush := func() {
		if pages > 0 {
			errs = append(errs, s.writeRounds(ctx, round))
		}
		round, pages = nil, 0
	}
	for _, r := range runs(dirty, roundPages) {
		if pages+len(r) > roundPages || len(round) > 0 && round[0][0].of != r[0].of {
			flush()
		}
		round, pages = append(round, r), pages+len(r)
	}
	flush()
	return errors.Join(errs...)
}

// writeRounds writes runs of one space back: in one round, or, where that fails, in one for each region, because one that is lost must not hold up the others.
func (s *Server) writeRounds(ctx context.Context, round []run) error {
	err := s.writeRound(ctx, round)
	if err == nil {
		return nil
	}
	each := byRegion(round, round[0][0].of.space.Info().RegionBytes/pageBytes)
	if len(each) == 1 {
		return err
	}
	var errs []error
	for _, part := range each {
		errs = append(errs, s.writeRound(ctx, part))
	}
	return errors.Join(errs...)
}

// byRegion divides runs, in order, at the borders of regions of so many pages.
func byRegion(round []run, pages uint64) (each [][]run) {
	last := uint64(0)
	for _, r := range round {
		for len(r) > 0 {
			region := r.first() / pages
			n := min(uint64(len(r)), (region+1)*pages-r.first())
			if len(each) == 0 || region != last {
				each, last = append(each, nil), region
			}
			i := len(each) - 1
			each[i], r = append(each[i], r[:n]), r[n:]
		}
	}
	return each
}

// writeRound writes runs of one space back.
func (s *Server) writeRound(ctx context.Context, round []run) error {
	of, pages := round[0][0].of, 0
	pieces := make([]space.Piece, len(round))
	for i, r := range round {
		pages += len(r)
		// Its bytes stand still from here on, until the frame is released.
		if err := of.protect(r.first(), uint64(len(r))); err != nil {
			return err
		}
		pieces[i] = space.Piece{Address: of.address(r.first()), Bytes: of.bytes(r.first(), uint64(len(r)))}
	}
	if err := of.space.WritePieces(ctx, pieces); err != nil {
		s.count.failed.Add(1)
		return fmt.Errorf("writing back %d pages of space %q, the first at %#x: %w", pages, of.id.Name, pieces[0].Address, err)
	}
	s.count.written.Add(uint64(pages) * pageBytes)
	s.cache.mu.Lock()
	for _, r := range round {
		for _, f := range r {
			s.cache.clean(f)
		}
	}
	s.cache.mu.Unlock()
	return nil
}

// sync writes back the pages of a range that are dirty now.
func (s *Server) sync(ctx context.Context, of *memory, first, n uint64) error {
	pages := s.cache.within(of, first, n, func(f *frame) bool { return f.dirty })
	until, _ := ctx.Deadline()
	var errs []error
	for len(pages) > 0 && ctx.Err() == nil {
		part := pages[:min(len(pages), roundPages)]
		pages = pages[len(part):]
		var mine []*frame
		for _, p := range part { // in order: see the package comment
			f, err := s.cache.take(of, p, until)
			if err != nil {
				errs = append(errs, fmt.Errorf("page %#x of space %q: %w", of.address(p), of.id.Name, err))
			} else if f != nil {
				mine = append(mine, f)
			}
		}
		if len(mine) > 0 {
			errs = append(errs, s.writeBack(ctx, mine))
			s.cache.release(mine...)
		}
	}
	return errors.Join(append(errs, ctx.Err())...)
}
