package pager

import (
	"context"
	"fmt"

	"github.com/zeebo/xxh3"
)

// acquirePages is how many pages are compared in one round.
const acquirePages = roundPages

// acquire drops the clean pages of a range that differ from the space. A page that is not dropped had the space's bytes at some time during the call, and is
// not dirty; or it is dirty. It returns how many were dropped.
func (s *Server) acquire(ctx context.Context, of *memory, first, n uint64) (dropped uint64, _ error) {
	pages := s.cache.within(of, first, n, func(*frame) bool { return true })
	until, _ := ctx.Deadline()
	for len(pages) > 0 {
		part := pages[:min(len(pages), acquirePages)]
		pages = pages[len(part):]
		var mine []*frame
		for _, p := range part { // in order: see the package comment
			f, err := s.cache.take(of, p, until)
			if err != nil {
				if len(mine) > 0 {
					s.cache.release(mine...)
				}
				return dropped, fmt.Errorf("comparing page %#x of space %q: %w", of.address(p), of.id.Name, err)
			}
			if f != nil && s.isDirty(f) {
				s.cache.release(f)
			} else if f != nil {
				mine = append(mine, f)
			}
		}
		d, err := s.compare(ctx, mine)
		dropped += d
		if err != nil {
			return dropped, err
		}
	}
	return dropped, nil
}

// compare drops those of the caller's clean frames that differ from the space, and releases the others.
func (s *Server) compare(ctx context.Context, frames []*frame) (dropped uint64, err error) {
	var same []*frame
	defer func() {
		if len(same) > 0 {
			s.cache.release(same...)
		}
	}()
	hashes := make([]uint64, acquirePages)
	for _, r := range runs(frames, acquirePages) {
		if err != nil { // of a run before: what is left stays
			same = append(same, r...)
			continue
		}
		of := r[0].of
		if err = of.space.Hashes(ctx, of.address(r.first()), pageBytes, hashes[:len(r)]); err != nil {
			err = fmt.Errorf("comparing %d pages at %#x of space %q: %w", len(r), of.address(r.first()), of.id.Name, err)
			same = append(same, r...)
			continue
		}
		for i, f := range r {
			if xxh3.Hash(of.bytes(f.page, 1)) == hashes[i] {
				same = append(same, f)
				continue
			}
			if ferr := s.forget(run{f}); ferr != nil { // it still has its old bytes
				err = ferr
				continue
			}
			dropped++
		}
	}
	s.count.dropped.Add(dropped)
	return dropped, err
}

// prefetch reads the pages of a range that are in no frame, as many as half of the frames, and maps them in the program.
func (s *Server) prefetch(ctx context.Context, m *mapping, first, n uint64) error {
	left := uint64(s.cache.budget) / 2
	for page := first; page < first+n && left > 0; {
		if err := ctx.Err(); err != nil { // such as where no frame becomes free, because nothing can be written back
			return fmt.Errorf("reading ahead to page %#x of space %q: %w", m.of.address(page), m.of.id.Name, err)
		}
		more, _ := s.makeMore(ctx, m, page, min(left, first+n-page, roundPages))
		if len(more) == 0 { // it has a frame, or none is free: then it waits for one, or says why there is none
			f, err := s.make(ctx, m.of, page)
			if err != nil {
				return fmt.Errorf("reading ahead to page %#x of space %q: %w", m.of.address(page), m.of.id.Name, err)
			}
			if f == nil {
				page++
				continue
			}
			more = append(more, f)
		}
		all := run(more)
		if err := s.fill(ctx, m, all, visible{}); err != nil {
			_ = s.forget(all)
			return err
		}
		s.cache.release(all...)
		page, left = page+uint64(len(all)), left-uint64(len(all))
	}
	return nil
}
