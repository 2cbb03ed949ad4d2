package storagenode

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma/host"
)

// unfitAfter is how long a node may be unable to write its state before it tells its
// controllers that it is unfit. One slow fsync is no reason to fail over.
const unfitAfter = 2 * time.Second

// errUnsaved: the node's state could not be written to its folder.
var errUnsaved = errors.New("keeping the node's state")

// wanted records that the state has changed and must be saved. Preconditions: n.mu is held.
func (n *Node) wanted() {
	n.keptSeq++
	n.unsaved.CompareAndSwap(0, clock.Now())
}

// save returns once the state of step seq, or a later one, is in the folder. One save
// runs at a time, without n.mu: a disk that hangs must not keep the node from answering.
func (n *Node) save(ctx context.Context, seq uint64) error {
	select {
	case n.saving <- struct{}{}:
		defer func() { <-n.saving }()
	case <-ctx.Done():
		return fmt.Errorf("%w: another write has not ended: %w", errUnsaved, ctx.Err())
	}
	if n.savedSeq >= seq {
		return nil // the save of a later step included it
	}
	n.mu.Lock()
	newest, b := n.keptSeq, n.state.Kept.Encode()
	n.mu.Unlock()
	var err error
	if n.keeper != nil { // a node without one saves nothing
		err = n.keeper.save(b)
	}
	if err != nil {
		err = fmt.Errorf("%w: %w", errUnsaved, err)
		n.saveErr.Store(&err)
		return err
	}
	n.savedSeq = newest
	n.saveErr.Store(nil)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.unsaved.Store(0)
	if n.keptSeq != newest {
		n.unsaved.Store(clock.Now())
	}
	return nil
}

// saveAgain tries to save a state that could not be saved, beside the heartbeat: a
// controller that gave up on the node meanwhile does not send its command again.
func (n *Node) saveAgain() {
	if n.unsaved.Load() == 0 || !n.savingAgain.CompareAndSwap(false, true) {
		return
	}
	n.wg.Go(func() {
		defer n.savingAgain.Store(false)
		n.mu.Lock()
		seq := n.keptSeq
		n.mu.Unlock()
		ctx, cancel := context.WithTimeout(n.ctx, actTimeout)
		defer cancel()
		_ = n.save(ctx, seq) // unfit reports the failure
	})
}

// unsavedFor is for how long the newest state could not be written.
func (n *Node) unsavedFor() time.Duration {
	if since := n.unsaved.Load(); since != 0 {
		return time.Duration(max(0, clock.Now()-since))
	}
	return 0
}

// unfit is why the node cannot carry out commands of controllers, fences above all, or keep what was flushed; "" if it can. Preconditions: n.mu is
// not held.
func (n *Node) unfit() string {
	if err := n.failedFlush(); err != nil {
		return err.Error()
	}
	unsaved := n.unsavedFor()
	if unsaved < unfitAfter {
		return ""
	}
	why := "the write does not end"
	if err := n.saveErr.Load(); err != nil {
		why = (*err).Error()
	}
	return fmt.Sprintf("%s cannot be written for %v: %s", n.cfg.Dir, unsaved.Round(time.Second), why)
}

// noteFailure leaves word of the first region that is not flushed any more, beside the heartbeat.
func (n *Node) noteFailure() {
	if n.noted {
		return
	}
	if err := n.failedFlush(); err != nil {
		n.noted = true
		n.wg.Go(func() { n.keeper.note(err.Error()) })
	}
}

// failedFlush is why a region here is not flushed any more.
func (n *Node) failedFlush() error {
	n.mu.Lock()
	numbers := n.regionNumbers()
	memories := make([]*host.Memory, len(numbers))
	for i, number := range numbers {
		memories[i] = n.memories[number]
	}
	n.mu.Unlock()
	for i, m := range memories {
		if err := m.Failed(); err != nil {
			return fmt.Errorf("region %d: %w", numbers[i], err)
		}
	}
	return nil
}
