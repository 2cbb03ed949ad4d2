//go:build cgo && verbs && yardstick

package verbs

// #include "verbs.h"
// int64_t q_bare(q_lane *l, int n, uint64_t sequence);
import "C"

import (
	"errors"
	"time"

	"github.com/quarrystore/quarry/rdma"
)

// bare runs a chain with nothing of ours but the posting, timed within C: the least that
// it can take on this queue pair.
func (c *conn) bare(ch *rdma.Chain) (time.Duration, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := posted{chain: ch}
	if !c.write(&p) {
		return 0, errors.New("the chain cannot be written down")
	}
	ns := C.q_bare(c.lane, C.int(p.wrs), C.uint64_t(p.seq))
	if ns < 0 {
		return 0, errors.New("the chain has failed")
	}
	c.collect(&p, p.wrs)
	return time.Duration(ns), nil
}
