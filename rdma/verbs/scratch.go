//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/rdma"
	"golang.org/x/sys/unix"
)

const (
	// slots is how many chains of a lane can be under way.
	slots = 4
)

var _ = [1]struct{}{}[rdma.MaxChainVerbs+1-C.Q_CHAIN]
var _ = [1]struct{}{}[slots*rdma.MaxChainVerbs-C.Q_SEND_WRS]
var _ = [1]struct{}{}[mostDepth-C.Q_SEND_WRS]

// scratch is a lane's own registered memory: where atomics leave their answers,
// and through which buffers travel that the device cannot reach.
type scratch struct {
	answers   []byte           // slots * MaxChainVerbs words
	answersMR *C.struct_ibv_mr // of answers, for as long as the conn is open
	words     []uint64         // the same memory as answers

	stage   []byte                           // nil until needed
	stageMR *C.struct_ibv_mr                 // of stage
	staged  int                              // bytes of stage in use, from its start; 0 when no chain is under way
	stageAt [slots][rdma.MaxChainVerbs]int32 // 1 + place of the verb's buffer; 0 = its own

	notes   []byte           // what nodes are asked to do, and their answer; nil until needed
	notesMR *C.struct_ibv_mr // of notes

	cached span // the piece that find returned last
}

// prepare makes and registers the memory that the answers of atomics go to.
func (c *conn) prepare() (err error) {
	c.answers, c.answersMR, err = c.pinned(slots * rdma.MaxChainVerbs * 8)
	if err != nil {
		return fmt.Errorf("memory of a lane: %w", err)
	}
	c.words = words(c.answers)
	return nil
}

// pinned maps memory and registers it with the adapter.
func (c *conn) pinned(bytes int) ([]byte, *C.struct_ibv_mr, error) {
	mem, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, nil, err
	}
	mr, err := register(c.dialer.buffers.pd, mem, addressOf(mem), c.dialer.buffers.access)
	if err != nil {
		unix.Munmap(mem)
		return nil, nil, err
	}
	return mem, mr, nil
}

// room finds n bytes of the stage for the first of verbs. full: there will be some when
// chains under way have been awaited.
func (c *conn) room(n int, verbs []rdma.Verb) (at int, full bool, err error) {
	if c.slots == 0 && c.staged == 0 {
		// The first buffer of the only chain: now the stage can grow, to hold all of it.
		if err := c.grow(verbs); err != nil {
			return 0, false, err
		}
	}
	if c.staged+n > len(c.stage) {
		return 0, true, nil
	}
	at = c.staged
	c.staged += (n + 63) &^ 63
	return at, false, nil
}

// grow makes the stage large enough for the buffers of verbs.
// Preconditions: nothing is under way.
func (c *conn) grow(verbs []rdma.Verb) error {
	need := 0
	for i := range verbs {
		if v := &verbs[i]; v.Op == rdma.Read || v.Op == rdma.Write {
			need += (len(v.Buf) + 63) &^ 63
		}
	}
	if need <= len(c.stage) {
		return nil
	}
	size := stageLeast
	for size < need {
		size *= 2
	}
	mem, mr, err := c.pinned(min(size, stageBytes))
	if err != nil {
		return fmt.Errorf("%w: no memory to copy buffers through: %w", rdma.ErrLimit, err)
	}
	if c.stageMR != nil {
		if err := problem("deregistering a lane's memory", C.q_deregister(c.stageMR)); err != nil {
			C.q_deregister(mr)
			unix.Munmap(mem)
			return fmt.Errorf("%w: %w", rdma.ErrLimit, err)
		}
		unix.Munmap(c.stage)
	}
	c.stage, c.stageMR = mem, mr
	return nil
}

// release gives the memory back.
// Preconditions: there is no queue pair.
func (c *conn) release() error {
	var errs []error
	for _, m := range []struct {
		mr  *C.struct_ibv_mr
		mem []byte
	}{{c.answersMR, c.answers}, {c.stageMR, c.stage}, {c.notesMR, c.notes}} {
		if m.mr == nil {
			continue
		}
		if err := problem("deregistering a lane's memory", C.q_deregister(m.mr)); err != nil {
			errs = append(errs, err) // still pinned: it must stay mapped
			continue
		}
		errs = append(errs, unix.Munmap(m.mem))
	}
	c.answersMR, c.stageMR, c.notesMR, c.answers, c.stage, c.notes, c.words = nil, nil, nil, nil, nil, nil, nil
	return errors.Join(errs...)
}
