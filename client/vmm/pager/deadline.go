package pager

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// deadline is a context that ends at a time. It sets a timer only where something waits for its end: most faults are served without, and a timer that is set
// wakes another thread of the process.
type deadline struct {
	at   time.Time
	once sync.Once
	ctx  atomic.Pointer[context.Context] // with the timer, when there is one
	end  context.CancelFunc
}

// until is a context that ends at a time. release frees its timer, if it has one, and ends what was derived from it.
func until(at time.Time) (ctx context.Context, release func()) {
	d := &deadline{at: at}
	return d, d.release
}

func (d *deadline) release() {
	d.once.Do(func() {}) // no timer is set any more
	if d.end != nil {
		d.end()
	}
}

func (d *deadline) Deadline() (time.Time, bool) { return d.at, true }

// Value is that of the context with the timer, so that contexts that are derived end with it.
func (d *deadline) Value(key any) any {
	if ctx := d.ctx.Load(); ctx != nil {
		return (*ctx).Value(key)
	}
	return nil
}

// Err is not nil when the channel of Done is closed.
func (d *deadline) Err() error {
	if ctx := d.ctx.Load(); ctx != nil {
		if err := (*ctx).Err(); err != nil {
			return err
		}
	}
	if !time.Now().Before(d.at) {
		return context.DeadlineExceeded
	}
	return nil
}

func (d *deadline) Done() <-chan struct{} {
	d.once.Do(func() {
		ctx, end := context.WithDeadline(context.Background(), d.at)
		d.end = end
		d.ctx.Store(&ctx)
	})
	if ctx := d.ctx.Load(); ctx != nil {
		return (*ctx).Done()
	}
	return nil
}
