package job

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/quarrystore/quarry/client"
)

// failureKept is how long the failure of a compilation is the answer to further calls.
const failureKept = 10 * time.Second

// maxCompiles bounds the compilations that are under way, or wait for their turn, or have failed of late.
const maxCompiles = 64

// codes are the compilations of modules that calls of functions need. A module is compiled once, whatever the number of calls: they do not queue up
// for it. Machine code is kept by the shelf.
type codes struct {
	compiles sync.WaitGroup // under way, or waiting for their turn

	mu     sync.Mutex       // guards what follows
	byHash map[string]*code // that have not succeeded
}

// code is a compilation.
type code struct {
	done  chan struct{} // closed when it has ended: then the fields below do not change any more
	err   error
	again time.Time // when a failed one is tried again
}

// ended says whether the compilation is over.
func (c *code) ended() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// get has a module compiled. The call that begins that waits for it as long as its context allows; compiling goes on after the call
// has ended. Others get ErrBusy at once.
func (k *codes) get(ctx context.Context, hash string, compile func() error) error {
	c, mine := k.begin(hash, compile)
	if c == nil {
		return fmt.Errorf("%w: %d modules are being compiled, or could not be: call again", client.ErrBusy, maxCompiles)
	}
	if mine {
		select {
		case <-c.done:
		case <-ctx.Done():
		}
	}
	if !c.ended() {
		return fmt.Errorf("%w: it is still being compiled: call again", client.ErrBusy)
	}
	return c.err
}

// begin finds the compilation of a module, or begins it; nil: there are too many.
func (k *codes) begin(hash string, compile func() error) (c *code, mine bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	for h, o := range k.byHash {
		if o.ended() && !now.Before(o.again) {
			delete(k.byHash, h)
		}
	}
	if c = k.byHash[hash]; c != nil {
		return c, false
	}
	if len(k.byHash) >= maxCompiles {
		return nil, false
	}
	if k.byHash == nil {
		k.byHash = map[string]*code{}
	}
	c = &code{done: make(chan struct{})}
	k.byHash[hash] = c
	k.compiles.Go(func() {
		err := survived(compile)
		k.mu.Lock()
		defer k.mu.Unlock()
		if c.err, c.again = err, time.Now().Add(failureKept); err == nil {
			delete(k.byHash, hash)
		}
		close(c.done)
	})
	return c, true
}

// survived is a compilation whose panic is its error.
func survived(compile func() error) (err error) {
	defer caught(&err)
	return compile()
}
