package job

import (
	"context"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/client"
)

// This file records why processes have ended that worked under a worker's name before. Such a process could not record it, and
// those that take its parts over do not know it.

// bequeathed says why the process has ended in which a part runs by its record; "" if it runs elsewhere, or the reason is not known. A session does
// not tell the process: one process has many, and a second one may end before the first one's session is fenced.
func (w *worker) bequeathed(p *Part) (why string) {
	if p.State != Running || p.Worker != w.Name || p.Life == w.Life {
		return ""
	}
	return w.Before[p.Life]
}

// disown records that the attempt of such a part has failed, once nothing of it can change memory any more. It counts as one of
// the part's attempts: the part may be what has ended the process.
// Linearizes at: the swap of the part's record.
func (w *worker) disown(ctx context.Context, p *Part, why string) error {
	if !w.halted(ctx, p) {
		return nil // it is looked at again
	}
	p.State, p.Session, p.Error = Pending, client.Session{}, cut(why, maxErrorLen)
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
