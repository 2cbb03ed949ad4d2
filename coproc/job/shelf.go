package job

import (
	"context"
	"sync"
)

// maxModules is how many modules of a worker have machine code at a time, beside those in use: it lies outside of the heap, where no limit of memory sees it.
const maxModules = 32

// shelf keeps the machine code of modules, those that were used last.
//
// Invariant: code is closed once: when it is dropped, or, if it is in use then, with its last use.
type shelf struct {
	most int

	mu     sync.Mutex // guards what follows, and the fields of shelved
	byHash map[string]*shelved
	clock  uint64 // rises with each use
}

type shelved struct {
	*module
	uses    int
	last    uint64
	dropped bool
}

// take finds a module. release ends the use.
func (s *shelf) take(hash string) (m *module, release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	have := s.byHash[hash]
	if have == nil {
		return nil, nil
	}
	return have.module, s.use(have)
}

// put adds a module that is not there yet, as used, and drops those that are too many.
func (s *shelf) put(hash string, m *module) (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byHash == nil {
		s.byHash = map[string]*shelved{}
	}
	for len(s.byHash) >= s.most {
		var oldest string
		for h, o := range s.byHash {
			if was := s.byHash[oldest]; was == nil || o.last < was.last {
				oldest = h
			}
		}
		s.drop(oldest)
	}
	have := &shelved{module: m}
	s.byHash[hash] = have
	return s.use(have)
}

// use counts a use. mu is held.
func (s *shelf) use(m *shelved) (release func()) {
	s.clock++
	m.uses, m.last = m.uses+1, s.clock
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if m.uses--; m.uses == 0 && m.dropped {
			m.free()
		}
	})
}

// drop forgets a module. mu is held.
func (s *shelf) drop(hash string) {
	m := s.byHash[hash]
	delete(s.byHash, hash)
	if m.dropped = true; m.uses == 0 {
		m.free()
	}
}

// close drops all modules.
func (s *shelf) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for h := range s.byHash {
		s.drop(h)
	}
}

// free frees the machine code of a module that nothing uses.
func (m *module) free() { _ = m.code.Close(context.Background()) }
