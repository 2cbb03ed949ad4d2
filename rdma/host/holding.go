package host

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"golang.org/x/sys/unix"
)

// holding is what the processes of a session were sent over shm. The gate stops a process
// that keeps the protocol; when the session ends, a holding ends only with what the kernel
// shows of its processes.
type holding struct {
	memories  map[*Memory]struct{} // regions sent for writing to any of the processes, until they are closed
	processes map[int]*Process     // by pid
}

// looks is how often a process without the memory is looked at: one that moves its mapping
// about while it is looked at would be seen with it.
const looks = 8

// hold notes that the process of a lane is about to be sent a memory.
// Preconditions: Access.mu held; the lane has access.
func (a *Access) hold(l *Lane, m *Memory) error {
	if m.device && l.process != nil && !l.process.Opens() {
		return rdma.ErrMapping // it would be sent all regions of the device
	}
	m = m.held()
	if l.process == nil || l.process.Own() || l.ticket.Rights != rdma.ReadWrite {
		return nil // what is sent for reading cannot be mapped for writing
	}
	if _, err := m.identity(); err != nil {
		return err // it could not be looked for
	}
	h := a.holdings[l.ticket.Serial]
	if h == nil {
		h = &holding{memories: make(map[*Memory]struct{}), processes: make(map[int]*Process)}
		a.holdings[l.ticket.Serial] = h
	}
	if p := h.processes[l.process.Pid]; p == nil || p.Dead() {
		h.prune()
		if len(h.processes) >= a.limits.LanesPerSession {
			return rdma.ErrLimit
		}
		p, err := l.process.dup()
		if err != nil {
			return err
		}
		h.processes[p.Pid] = p
	}
	h.memories[m] = struct{}{}
	return nil
}

// prune forgets processes that have ended, and memory that is no region's any more. Children
// of such a process, and those it has sent the memory to, are found without it.
func (h *holding) prune() {
	for pid, p := range h.processes {
		if p.Dead() {
			delete(h.processes, pid)
			p.Close()
		}
	}
	for m := range h.memories {
		if m.isClosed() {
			delete(h.memories, m)
		}
	}
}

// over takes out the processes and memories of sessions that have ended.
func (a *Access) over(serials []uint64) (processes []*Process, memories []*Memory) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, serial := range serials {
		h := a.holdings[serial]
		if h == nil {
			continue
		}
		h.prune()
		for _, p := range h.processes {
			processes = append(processes, p)
		}
		for m := range h.memories {
			if !slices.Contains(memories, m) {
				memories = append(memories, m)
			}
		}
	}
	return processes, memories
}

// mayHold says whether a process has a memory by a session that has not ended; none has once all access is withdrawn.
func (a *Access) mayHold(pid int, m *Memory) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.withdrawn {
		return false
	}
	for serial, h := range a.holdings {
		_, sent := h.memories[m]
		if p := h.processes[pid]; sent && p != nil && a.ended.Admits(serial) && !p.Dead() {
			return true
		}
	}
	return false
}

// dispossess returns nil when no process that the ended sessions have handed the memory to can
// write it: each has been seen without it, or has ended. A process gets killAfter to give
// the memory up, and is killed then.
// Preconditions: the sessions are not admitted any more; their lanes have been removed.
func (a *Access) dispossess(ctx context.Context, serials []uint64) error {
	processes, memories := a.over(serials)
	if len(memories) > 0 {
		s, err := newSight(memories)
		if err != nil {
			return err
		}
		o := &ousting{a: a, sight: s, since: time.Now(), foreign: make(map[int]time.Time)}
		for _, p := range processes {
			if err := o.member(ctx, p); err != nil {
				return err
			}
		}
		if err := o.everyone(ctx); err != nil {
			return err
		}
	}
	a.forget(serials)
	return nil
}

// forget drops the holdings of sessions.
func (a *Access) forget(serials []uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, serial := range serials {
		if h := a.holdings[serial]; h != nil {
			for _, p := range h.processes {
				p.Close()
			}
			delete(a.holdings, serial)
		}
	}
}

// ousting is the end of some sessions' holdings.
type ousting struct {
	a       *Access           // whose living sessions may keep the same memory
	sight   *sight            // the memories to look for
	since   time.Time         // when it began; KillAfter counts from here for member processes
	foreign map[int]time.Time // when a process that no lane has come from was first seen with the memory
}

// unlawful is a memory that a process can write without a session that has it; parked and sockets are those of look.
func (o *ousting) unlawful(pid int, sockets bool) (held *Memory, parked bool, err error) {
	memories, parked, err := o.sight.look(pid, sockets)
	for _, m := range memories {
		if !o.a.mayHold(pid, m) {
			return m, parked, err
		}
	}
	return nil, parked, err
}

// member returns nil when a process of the sessions has ended or given the memory up.
func (o *ousting) member(ctx context.Context, p *Process) error {
	clean, relapses := 0, 0
	for w := (wait{}); clean < looks; {
		if p.Dead() {
			return nil
		}
		held, parked, err := o.unlawful(p.Pid, true)
		if held == nil && !parked && err == nil {
			clean++
			continue
		}
		if clean > 0 {
			clean, relapses = 0, relapses+1
		}
		why := reason(held, err)
		if relapses > 2 || time.Since(o.since) > o.a.limits.KillAfter {
			if err := o.a.kill(p, why); err != nil {
				return err
			}
		}
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("process %d %s: %w", p.Pid, why, err)
		}
		w.pause()
	}
	return nil
}

// everyone returns nil when no process holds the memory that no session entitles to it: one
// forked by a member, or sent a descriptor. A process that cannot be looked into was no member.
func (o *ousting) everyone(ctx context.Context) error {
	for w := (wait{}); ; w.pause() {
		found := ""
		err := others(func(pid int) error {
			held, _, err := o.unlawful(pid, false)
			if held == nil || err != nil {
				return ctx.Err()
			}
			found = fmt.Sprintf("process %d %s", pid, reason(held, nil))
			return errors.Join(o.killForeign(pid), ctx.Err())
		})
		if found == "" {
			if err != nil {
				return err
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s: %w", found, err)
		}
	}
}

// killForeign kills a process that has had the memory for too long.
func (o *ousting) killForeign(pid int) error {
	first, known := o.foreign[pid]
	if !known {
		o.foreign[pid] = time.Now()
		return nil
	}
	if time.Since(first) <= o.a.limits.KillAfter {
		return nil
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil // it has ended
	}
	p := &Process{Pid: pid, fd: fd}
	defer p.Close()
	if held, _, err := o.unlawful(pid, false); held != nil && err == nil && !p.Dead() { // the number was not given to another meanwhile
		return o.a.kill(p, reason(held, nil))
	}
	return nil
}

// reason says why a process has to be killed: because of memory that it still holds, or because
// that could not be found out.
func reason(m *Memory, err error) string {
	switch {
	case err != nil:
		return fmt.Sprintf("of a session that has ended cannot be looked into: %v", err)
	case m == nil:
		return "of a session that has ended does not receive descriptors that it was sent"
	}
	return fmt.Sprintf("still holds the memory of %s, and its session has ended", m.Name())
}

// kill ends a process that keeps what it may not have.
func (a *Access) kill(p *Process, why string) error {
	first, err := p.Kill()
	switch {
	case errors.Is(err, unix.ESRCH):
		return nil
	case err != nil:
		return fmt.Errorf("process %d %s, and this node may not kill it (%w): end it", p.Pid, why, err)
	}
	if first {
		a.counters.kills.Add(1)
		if a.onKill != nil {
			a.onKill(p.Pid, why)
		}
	}
	return nil
}
