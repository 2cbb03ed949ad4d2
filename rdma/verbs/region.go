//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// rememberedKeys is how many old keys of a region are never given out again: they
// have 32 bits, of which adapters choose few at random.
const rememberedKeys = 4096

// region is what a server knows of one region, also while it is not served.
type region struct {
	number uint32 // in the table

	// mu is held while memory is registered or let go, which takes long.
	mu sync.Mutex
	// serving: a change of memory, epoch or tenant holds it together with mu; a flush holds it
	// alone, shared.
	serving sync.RWMutex
	// Invariant: epoch and closed never fall.
	epoch  uint64                   // served last
	closed uint64                   // newest epoch that has been closed
	secret [32]byte                 // of windowKey; drawn anew for each epoch, never sent
	tenant uint32                   // of memory, as its Own named it when the epoch was opened
	memory *host.Memory             // nil while not served
	mrs    map[*domain]registration // by domain: the one of the region's tenant
	past   []uint32                 // keys of former epochs

	// With windows, memory regions outlast epochs: nothing reaches them but through windows.
	windows bool
	pinned  *host.Memory     // what mrs are of
	grants  map[*lane]*grant // windows of the present epoch
}

// registration is a region's memory as one tenant's protection domain has it. The memory is
// pinned as long as it exists.
type registration struct {
	mr     *C.struct_ibv_mr // freed before the memory is unpinned
	memory *host.Memory
}

// region returns the server's entry of a region, and makes it if there is none.
func (s *Server) region(number uint32) *region {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.regions[number]
	if r == nil {
		r = &region{number: number, mrs: make(map[*domain]registration), grants: make(map[*lane]*grant)}
		s.regions[number] = r
	}
	return r
}

// OpenRegion serves memory under an epoch, with keys that were not used before. nil: no verb
// under an older key runs any more. If the epoch is being served already nothing changes. The
// memory stays mapped until the region is closed or opened with other memory.
func (s *Server) OpenRegion(ctx context.Context, number uint32, epoch uint64, m *host.Memory) error {
	r := s.region(number)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.memory == m && r.epoch == epoch {
		return nil
	}
	if epoch <= r.closed || r.memory != nil && epoch <= r.epoch {
		return fmt.Errorf("region %d: opening epoch %d: %w (served %d, closed %d)", number, epoch, host.ErrEpoch, r.epoch, r.closed)
	}
	windows := s.windows && !s.plain.Load()
	if err := r.letGo(ctx, windows && r.windows && r.pinned == m); err != nil {
		return err
	}
	r.windows = windows
	s.forgive()
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("region %d: opening epoch %d: %w", number, epoch, err)
	}
	s.mu.Lock()
	ended := s.closed
	s.mu.Unlock()
	if ended {
		return fmt.Errorf("region %d: the node stops", number)
	}
	rand.Read(r.secret[:])
	r.serve(m, epoch, m.Tenant())
	r.closed = max(r.closed, epoch-1)
	// Now, not at the first client's Open, which would have to wait for it.
	err := s.registerFor(r)
	if err == nil && s.acts != nil {
		err = s.acts.OpenRegion(ctx, number, epoch, m)
	}
	if err != nil {
		return errors.Join(err, r.letGo(ctx, false))
	}
	return nil
}

// serve changes what is served. It waits for the steps of flushes that are under way.
// Preconditions: mu is held.
func (r *region) serve(m *host.Memory, epoch uint64, tenant uint32) {
	r.serving.Lock()
	defer r.serving.Unlock()
	r.memory, r.epoch, r.tenant = m, epoch, tenant
}

// registerFor registers a region in the domain of its tenant. Several regions register at the
// same time.
// Preconditions: r.mu is held.
func (s *Server) registerFor(r *region) error {
	if r.windows && r.pinned != r.memory {
		// The memory is given up some time after its last epoch was closed.
		m := r.memory
		if err := m.AtEnd(func() error { return r.unpin(s, m) }); err != nil {
			return err
		}
		r.pinned = r.memory
	}
	s.mu.Lock()
	d, err := s.domain(r.tenant)
	s.mu.Unlock()
	if err == nil {
		_, err = s.registered(r, d)
	}
	return err
}

// registered is the memory region in the domain of the region's tenant.
// Preconditions: r.mu is held, the region is served.
func (s *Server) registered(r *region, d *domain) (*C.struct_ibv_mr, error) {
	if g, ok := r.mrs[d]; ok {
		return g.mr, nil
	}
	started := time.Now()
	if err := r.memory.Pin(); err != nil {
		return nil, fmt.Errorf("region %d: %w", r.number, err)
	}
	mr, err := r.register(d, s.regionAccess(r.windows, r.memory), s.device.base)
	if err != nil {
		r.memory.Unpin()
		s.log.Error("verbs fabric: region cannot be registered", "region", r.number, "error", err)
		return nil, err
	}
	r.mrs[d] = registration{mr: mr, memory: r.memory}
	took := time.Since(started)
	s.registrations.Add(1)
	s.registeredNs.Add(uint64(took))
	s.log.Info("verbs fabric: region registered", "region", r.number, "bytes", len(r.memory.Bytes()), "tenant", r.tenant, "took", took)
	return mr, nil
}

// CloseRegion stops serving a region under epochs up to this one. nil: no verb under a key of
// these epochs runs any more, and OpenRegion refuses them.
func (s *Server) CloseRegion(ctx context.Context, number uint32, epoch uint64) error {
	r := s.region(number)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = max(r.closed, epoch)
	if s.acts != nil {
		if err := s.acts.CloseRegion(ctx, number, epoch); err != nil {
			return err
		}
	}
	if r.memory != nil && r.epoch > epoch {
		return nil
	}
	return r.letGo(ctx, r.windows)
}

// forgive resets the counts of offences when keys change: a client that uses the old ones is
// late, and not hostile.
func (s *Server) forgive() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.offences)
}

// cut ends all access to the region, and returns when no verb reaches it any more.
func (r *region) cut(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.letGo(ctx, false)
}

// unpin ends the registrations of memory that is about to be unmapped.
func (r *region) unpin(s *Server, m *host.Memory) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pinned != m {
		return nil // other memory has taken its place
	}
	return r.letGo(s.ctx, false)
}

// letGo ends access under the present epoch: no verb touches the memory through a window that was
// invalidated, or a memory region that was deregistered. keep spares memory regions that can be
// reached through windows only.
// Preconditions: mu is held.
func (r *region) letGo(ctx context.Context, keep bool) error {
	r.serve(nil, r.epoch, r.tenant)
	for l, g := range r.grants {
		if err := l.takeBack(ctx, g); err != nil {
			return fmt.Errorf("region %d: %w", r.number, err)
		}
		r.remember(g.rkey)
		delete(r.grants, l)
	}
	if keep {
		return nil
	}
	r.pinned = nil
	for d, g := range r.mrs {
		key := uint32(g.mr.rkey)
		if err := problem(fmt.Sprintf("region %d: deregistering", r.number), C.q_deregister(g.mr)); err != nil {
			return err
		}
		g.memory.Unpin()
		delete(r.mrs, d)
		r.remember(key)
	}
	return nil
}

// remember keeps a key from being given out again.
func (r *region) remember(key uint32) {
	if len(r.past) == rememberedKeys {
		r.past = slices.Delete(r.past, 0, 1)
	}
	r.past = append(r.past, key)
}

// grant gives a lane access to a region under an epoch. ErrKey while the region is
// not served under that epoch, ErrTicket if it is another tenant's.
func (s *Server) grant(l *lane, number uint32, epoch uint64, slot int32, a *answer) error {
	s.mu.Lock()
	r := s.regions[number]
	s.mu.Unlock()
	if r == nil {
		return rdma.ErrKey
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.memory == nil || r.epoch != epoch {
		return rdma.ErrKey
	}
	if r.tenant != l.ticket.Tenant {
		return rdma.ErrTicket
	}
	mr, err := s.registered(r, l.domain)
	if err != nil {
		return err
	}
	rkey := uint32(mr.rkey)
	if r.windows {
		rkey, err = r.bind(s.ctx, l, mr)
		if err != nil {
			s.log.Warn("verbs fabric: window", "region", number, "session", l.ticket.Session, "error", err)
			if refused, err := s.tryWindow(r, l.domain, mr); err != nil || !refused {
				return rdma.ErrBroken
			}
			if err := s.withoutWindows(s.ctx, r, err); err != nil {
				s.log.Error("verbs fabric: region cannot be served without windows", "region", number, "error", err)
			}
			return rdma.ErrBroken // its queue pair may have ended with the bind
		}
	}
	a.key, a.rkey, a.bytes = r.windowKey(l.ticket.Serial), rkey, uint64(len(r.memory.Bytes()))
	if s.acts != nil {
		if a.key, err = s.openActing(l, number, epoch, slot); err != nil {
			return err
		}
		a.base = s.device.base(r.memory.Bytes())
	}
	a.flush, a.flushes, a.verifies = s.method(r.memory), s.flushes, true
	return nil
}

// regionAccess is the access that a memory region gives to queue pairs. The queue pairs of
// read-only sessions do not allow changes. Where there are windows they alone give access.
func (s *Server) regionAccess(windows bool, m *host.Memory) C.int {
	switch {
	case windows && s.device.config.unbindable:
		return C.IBV_ACCESS_LOCAL_WRITE
	case windows:
		return C.IBV_ACCESS_LOCAL_WRITE | C.IBV_ACCESS_MW_BIND
	case s.method(m) == rdma.Native:
		return s.device.regionAccess() | C.Q_ACCESS_FLUSH | C.Q_ACCESS_PERSISTENT
	case s.flushes:
		return s.device.regionAccess() | C.Q_ACCESS_FLUSH
	}
	return s.device.regionAccess()
}

// regionAccess is the access to a region's memory. Where processors execute the atomics the adapter executes none, whoever asks.
func (d *device) regionAccess() C.int {
	if d.acts() {
		return regionAccess &^ C.IBV_ACCESS_REMOTE_ATOMIC
	}
	return regionAccess
}

const regionAccess = C.IBV_ACCESS_LOCAL_WRITE | C.IBV_ACCESS_REMOTE_READ | C.IBV_ACCESS_REMOTE_WRITE | C.IBV_ACCESS_REMOTE_ATOMIC

// register hands the region to the adapter, addressed from 0, under a new key.
func (r *region) register(d *domain, access C.int, base func(mem []byte) uint64) (*C.struct_ibv_mr, error) {
	var used []*C.struct_ibv_mr
	defer func() {
		for _, mr := range used {
			C.q_deregister(mr)
		}
	}()
	for {
		mr, err := register(d.pd, r.memory.Bytes(), base(r.memory.Bytes()), access)
		if err != nil {
			return nil, fmt.Errorf("region %d: %w", r.number, err)
		}
		if !slices.Contains(r.past, uint32(mr.rkey)) {
			return mr, nil
		}
		if used = append(used, mr); len(used) > 16 {
			return nil, fmt.Errorf("region %d: the device gives out nothing but keys that were used before", r.number)
		}
	}
}

// onRange calls do with the memory of a region, which is not closed meanwhile, for a lane that has asked for a range of it. Like
// grant it refuses regions that the lane's ticket does not open, and those of other tenants. It does not wait for memory that is
// being registered.
func (s *Server) onRange(l *lane, number uint32, epoch, off, bytes uint64, do func(m *host.Memory) error) error {
	if !l.ticket.Opens(number, epoch) {
		return rdma.ErrTicket
	}
	s.mu.Lock()
	r := s.regions[number]
	s.mu.Unlock()
	if r == nil {
		return rdma.ErrKey
	}
	r.serving.RLock()
	defer r.serving.RUnlock()
	if r.memory == nil || r.epoch != epoch {
		return rdma.ErrKey
	}
	if r.tenant != l.ticket.Tenant {
		return rdma.ErrTicket
	}
	if size := uint64(len(r.memory.Bytes())); off > size || bytes > size-off {
		return rdma.ErrBounds
	}
	return do(r.memory)
}

// persist flushes a range to stable storage for a lane whose adapter has no FLUSH.
func (s *Server) persist(l *lane, number uint32, epoch, off, bytes uint64) error {
	return s.onRange(l, number, epoch, off, bytes, func(m *host.Memory) error {
		if !m.Persistent() {
			return rdma.ErrNotPersistent
		}
		return m.Persist(off, bytes)
	})
}

// hash hashes a range for a lane: no adapter has a VERIFY.
func (s *Server) hash(l *lane, h *host.Hasher, number uint32, epoch, off, bytes, seed uint64) (sum uint64, err error) {
	err = s.onRange(l, number, epoch, off, bytes, func(m *host.Memory) error {
		sum = h.Hash(m.Bytes(), off, bytes, seed)
		s.verified.Add(bytes)
		return nil
	})
	return sum, err
}

// windowKey is a session's key of the region under its present epoch.
func (r *region) windowKey(serial uint64) uint64 {
	h := hmac.New(sha256.New, r.secret[:])
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], serial)
	for {
		h.Write(b[:])
		if key := binary.LittleEndian.Uint64(h.Sum(nil)); key != 0 {
			return key
		}
	}
}
