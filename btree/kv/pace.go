package kv

import (
	"context"
	"time"
)

// pace has a task that consists of steps work for a share of the time.
type pace struct {
	share int // percent; 0: always
	now   func() time.Time
	sleep func(time.Duration)
	began time.Time // the step
}

func newPace(share int, now func() time.Time, sleep func(time.Duration)) *pace {
	return &pace{share: share, now: now, sleep: sleep, began: now()}
}

// rest ends a step. It returns when the next one may begin.
func (p *pace) rest() {
	if p.share != 0 && p.share != 100 {
		p.sleep(p.now().Sub(p.began) * time.Duration(100-p.share) / time.Duration(p.share))
	}
	p.began = p.now()
}

// restFor waits for a time, or until a context ends.
func restFor(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
