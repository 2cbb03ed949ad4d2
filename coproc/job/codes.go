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

// codes are the modules that calls of functions have needed. A module is compiled once, whatever the number of calls: they do not queue up
// for it.
type codes struct {
	compiles sync.WaitGroup // under way, or waiting for their turn

	mu     sync.Mutex // guards what follows
	byHash map[string]*code
}

// code is a compilation.
type code struct {
	done    chan struct{} // closed when it has ended: then the fields below do not change any more
	program program
	err     error
	again   time.Time // when a failed one is tried again
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

// get is the machine code of a module. The call that has it compiled waits for that as long as its context allows; compiling goes on after the call
// has ended. Others get ErrBusy at once.
func (k *codes) get(ctx context.Context, hash string, compile func() (program, error)) (program, error) {
	c, mine := k.begin(hash, compile)
	if mine {
		select {
		case <-c.done:
		case <-ctx.Done():
		}
	}
	if !c.ended() {
		return nil, fmt.Errorf("%w: it is still being compiled: call again", client.ErrBusy)
	}
	return c.program, c.err
}

// begin finds the compilation of a module, or begins it.
func (k *codes) begin(hash string, compile func() (program, error)) (c *code, mine bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	for h, o := range k.byHash {
		if o.ended() && o.err != nil && !now.Before(o.again) {
			delete(k.byHash, h)
		}
	}
	if c = k.byHash[hash]; c != nil {
		return c, false
	}
	if k.byHash == nil {
		k.byHash = map[string]*code{}
	}
	c = &code{done: make(chan struct{})}
	k.byHash[hash] = c
	k.compiles.Go(func() {
		defer close(c.done)
		func() {
			defer caught(&c.err)
			c.program, c.err = compile()
		}()
		c.again = time.Now().Add(failureKept)
	})
	return c, true
}
