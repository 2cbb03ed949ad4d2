package btree

import (
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"testing"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// memory is slabs with the semantics of package slab, without a fabric: each call
// takes effect at one moment, an Update holds the slab from its READ to its commit,
// and whoever finds it held by a dead client takes it over.
type memory struct {
	slabs  map[proto.Addr]*memSlab
	next   uint32
	free   []proto.Addr
	rounds int
	// overhead is by how much payloads are longer in their slabs: that of encryption.
	overhead int
}

type memSlab struct {
	ref     Ref
	live    bool
	once    bool
	room    int
	tag     uint32
	payload []byte
	born    uint64
	version uint64
	heldBy  *memStore
}

func newMemory() *memory { return &memory{slabs: map[proto.Addr]*memSlab{}} }

// memStore is one client's way to the memory.
type memStore struct {
	*memory
	t     testing.TB
	dead  bool
	step  func() // a point where others may run, or the client may die
	lossy *rand.Rand
	// lent is the payload that callbacks of Update see: the same memory each time, as
	// with a lane, so that who keeps it is found out.
	lent []byte
}

func (m *memory) store(t testing.TB) *memStore { return &memStore{memory: m, t: t, step: func() {}} }

func (s *memStore) at(ref Ref) (*memSlab, error) {
	if !ref.Valid() {
		s.t.Fatalf("invalid ref %v", ref)
	}
	b := s.slabs[ref.Addr]
	if b == nil {
		s.t.Fatalf("no slab was ever at %v", ref)
	}
	if !b.live || b.ref != ref {
		return nil, fmt.Errorf("%w: %v", slab.ErrFreed, ref)
	}
	return b, nil
}

func (s *memStore) Begin() {}

func (s *memStore) Read(ref Ref, dst []byte) ([]byte, error) {
	s.step()
	s.rounds++
	b, err := s.at(ref)
	if err != nil {
		s.step()
		return dst, err
	}
	dst = append(dst, b.payload...)
	s.step()
	return dst, nil
}

func (s *memStore) View(ref Ref, fn func([]byte) error) error {
	b, err := s.Read(ref, nil)
	if err != nil {
		return err
	}
	err = fn(b)
	clear(b)
	return err
}

func (s *memStore) ReadMany(refs []Ref, fn func(i int, payload []byte, err error)) error {
	s.rounds++
	for k := range refs {
		i := len(refs) - 1 - k
		s.step()
		b, err := s.at(refs[i])
		if err != nil {
			fn(i, nil, err)
			continue
		}
		scratch := append([]byte(nil), b.payload...)
		fn(i, scratch, nil)
		clear(scratch)
	}
	s.step()
	return nil
}

// reserve takes a slab; see memory.
func (s *memStore) reserve(ref Ref) (*memSlab, error) {
	for {
		s.step()
		b, err := s.at(ref)
		if err != nil {
			return nil, err
		}
		if b.heldBy == nil || b.heldBy.dead {
			b.heldBy = s
			s.rounds++
			return b, nil
		}
	}
}

func (s *memStore) Update(ref Ref, f func(old []byte) ([]byte, error)) error {
	b, err := s.reserve(ref)
	if err != nil {
		return err
	}
	if b.once {
		s.t.Fatalf("update of the write-once %v", ref)
	}
	s.lent = append(s.lent[:0], b.payload...)
	now, err := f(s.lent)
	now = append([]byte(nil), now...)
	clear(s.lent)
	if err == nil && len(now)+s.overhead > b.room {
		s.t.Errorf("payload of %d bytes and %d in a slab with room for %d", len(now), s.overhead, b.room)
		err = slab.ErrTooLarge
	}
	s.step()
	s.rounds++
	lost := s.lossy != nil && s.lossy.IntN(40) == 0
	if err == nil && !(lost && s.lossy.IntN(2) == 0) {
		b.payload = now
		b.version++
	}
	b.heldBy = nil
	s.step()
	if err == nil && lost {
		return s.outcomeLost()
	}
	return err
}

// outcomeLost is the error of an Update whose outcome cannot be told: sometimes because the
// object has been freed when package slab looks for what it has committed.
func (s *memStore) outcomeLost() error {
	if s.lossy.IntN(2) == 0 {
		return fmt.Errorf("%w (%w)", slab.ErrUnknown, slab.ErrFreed)
	}
	return slab.ErrUnknown
}

func (s *memStore) Alloc(payload []byte, tag uint32, capacity int, once bool) (Ref, error) {
	s.step()
	s.rounds++
	var a proto.Addr
	if n := len(s.free); n > 0 {
		a = s.free[n-1]
		s.free = s.free[:n-1]
	} else {
		a = proto.MakeAddr(1, 1<<20+s.next*64)
		s.next++
		s.slabs[a] = &memSlab{}
	}
	b := s.slabs[a]
	b.born++
	*b = memSlab{ref: Ref{Addr: a, Incarnation: proto.MakeIncarnation(0, b.born)}, live: true, once: once, room: max(capacity, len(payload)) + s.overhead, tag: tag,
		payload: append([]byte(nil), payload...), born: b.born, version: 1}
	ref := b.ref
	s.step()
	return ref, nil
}

func (s *memStore) Free(ref Ref) error {
	b, err := s.reserve(ref)
	if err != nil {
		return err
	}
	s.step()
	b.live, b.heldBy = false, nil
	s.free = append(s.free, ref.Addr)
	s.step()
	return nil
}

// live counts slabs by tag.
func (m *memory) live() map[Ref]uint32 {
	out := map[Ref]uint32{}
	for _, b := range m.slabs {
		if b.live {
			out[b.ref] = b.tag
		}
	}
	return out
}

// world runs clients as coroutines, one step at a time, by a seed.
type world struct {
	*memory
	rng     *rand.Rand
	clients []*simClient
	now     int64
}

type simClient struct {
	*memStore
	prog  *Program
	next  func() (struct{}, bool)
	stop  func()
	ended bool
	steps int
	// spared: it is not killed.
	spared bool
}

var errKilled = errors.New("killed")

// start adds a client that runs body.
func (w *world) start(t testing.TB, sh *Shared, body func(c *simClient)) *simClient {
	c := &simClient{memStore: w.store(t)}
	c.prog = NewProgram(sh, c.memStore)
	c.next, c.stop = iter.Pull(func(yield func(struct{}) bool) {
		defer func() {
			if r := recover(); r != nil && r != errKilled {
				panic(r)
			}
		}()
		c.step = func() {
			if !yield(struct{}{}) {
				panic(errKilled)
			}
		}
		body(c)
	})
	w.clients = append(w.clients, c)
	return c
}

// kill ends a client where it stands: it holds what it holds.
func (c *simClient) kill() {
	c.dead = true
	c.step = func() { panic(errKilled) }
	c.stop()
	c.ended = true
}

// run steps clients in random order until all have ended.
func (w *world) run(each func(c *simClient)) {
	for {
		var ready []*simClient
		for _, c := range w.clients {
			if !c.ended {
				ready = append(ready, c)
			}
		}
		if len(ready) == 0 {
			return
		}
		c := ready[w.rng.IntN(len(ready))]
		w.now++
		c.steps++
		if _, ok := c.next(); !ok {
			c.ended = true
		} else if each != nil {
			each(c)
		}
	}
}
