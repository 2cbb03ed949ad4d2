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
	// inlineBytes is up to which length a WRITE travels within the work request.
	inlineBytes = 128
	// slots is how many chains of a lane can be under way.
	slots = 4
	// stageBytes holds the largest chain, each buffer aligned to a cache line.
	stageBytes = rdma.MaxChainBytes + 64*rdma.MaxChainVerbs
)

var _ = [1]struct{}{}[rdma.MaxChainVerbs-C.Q_CHAIN]
var _ = [1]struct{}{}[slots*rdma.MaxChainVerbs-C.Q_SEND_WRS]

// scratch is a lane's own registered memory: where atomics leave their answers,
// and through which buffers travel that the device cannot reach.
type scratch struct {
	answers   []byte // slots * MaxChainVerbs words
	answersMR *C.struct_ibv_mr
	words     []uint64

	stage   []byte // nil until needed
	stageMR *C.struct_ibv_mr
	staged  int
	stageAt [slots][rdma.MaxChainVerbs]int32 // 1 + place of the verb's buffer; 0 = its own

	cached span
}

func (c *conn) prepare() (err error) {
	c.answers, c.answersMR, err = c.pinned(slots * rdma.MaxChainVerbs * 8)
	if err != nil {
		return fmt.Errorf("memory of a lane: %w", err)
	}
	c.words = words(c.answers)
	return nil
}

func (c *conn) pinned(bytes int) ([]byte, *C.struct_ibv_mr, error) {
	mem, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, nil, err
	}
	mr, err := register(c.dialer.buffers.pd, mem, addressOf(mem), C.IBV_ACCESS_LOCAL_WRITE)
	if err != nil {
		unix.Munmap(mem)
		return nil, nil, err
	}
	return mem, mr, nil
}

// room finds n bytes of the stage. full: there will be some when chains under way
// have been awaited.
func (c *conn) room(n int) (at int, full bool, err error) {
	if c.stage == nil {
		if c.stage, c.stageMR, err = c.pinned(stageBytes); err != nil {
			return 0, false, fmt.Errorf("%w: no memory to copy buffers through: %w", rdma.ErrLimit, err)
		}
	}
	if c.staged+n > len(c.stage) {
		return 0, true, nil
	}
	at = c.staged
	c.staged += (n + 63) &^ 63
	return at, false, nil
}

// release gives the memory back.
// Preconditions: there is no queue pair.
func (c *conn) release() error {
	var errs []error
	for _, m := range []struct {
		mr  *C.struct_ibv_mr
		mem []byte
	}{{c.answersMR, c.answers}, {c.stageMR, c.stage}} {
		if m.mr == nil {
			continue
		}
		if err := problem("deregistering a lane's memory", C.q_deregister(m.mr)); err != nil {
			errs = append(errs, err) // still pinned: it must stay mapped
			continue
		}
		errs = append(errs, unix.Munmap(m.mem))
	}
	c.answersMR, c.stageMR, c.answers, c.stage, c.words = nil, nil, nil, nil, nil
	return errors.Join(errs...)
}
