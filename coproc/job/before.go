package job

import (
	"context"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/client"
)

// This file records why the process has ended that worked under a worker's name before. That process could not record it, and
// those that take its parts over do not know it.

// bequeathed says whether a part runs, by its record, in the process that had this worker's name before.
func (w *worker) bequeathed(p *Part) bool {
	return w.Before != "" && p.State == Running && p.Worker == w.Name && p.Session != w.session
}

// disown records that the attempt of such a part has failed, once nothing of it can change memory any more. It counts as one of
// the part's attempts: the part may be what has ended the process.
// Linearizes at: the swap of the part's record.
func (w *worker) disown(ctx context.Context, p *Part) error {
	if !w.halted(ctx, p) {
		return nil // it is looked at again
	}
	p.State, p.Session, p.Error = Pending, client.Session{}, cut(w.Before, maxErrorLen)
	p.log(fmt.Sprintf("attempt %d on %s: %s", p.Attempt, w.Name, p.Error))
	if p.spent() >= MaxAttempts {
		p.State = Failed
	}
	switch err := w.store.swapPart(ctx, p); {
	case errors.Is(err, errLost):
		p.State = Running // another worker has the part by now, whichever: leave it to the next listing
		return nil
	case err != nil:
		return err
	}
	w.Tally.attempts[place(phases[:], p.Phase)][outcomeFailed].Add(1)
	if p.State == Failed {
		return w.store.end(ctx, p.Job, Failed, fmt.Sprintf("%v: %s", p, p.Error))
	}
	return nil
}
