// Command slots is a worker for tests of slots that are processes: its plugin does what the key of each record says.
package main

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/worker"
)

type deed struct{}

func (deed) Map(env coproc.Env, key, value []byte, emit coproc.Emit) error {
	what, _, _ := strings.Cut(string(key), "-")
	switch what {
	case "greedy": // as a C library is that takes memory without end: Go's runtime does not know of it
		b, err := syscall.Mmap(-1, 0, 2<<30, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
		if err != nil {
			return err
		}
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		return fmt.Errorf("got %d bytes", len(b))
	case "waits":
		fmt.Fprintf(os.Stderr, "begun %s %d\n", key, os.Getpid())
		for {
			if _, err := os.Stat(env.Arg("until", "/")); err == nil {
				break
			}
			select {
			case <-env.Context().Done():
				return env.Context().Err()
			case <-time.After(5 * time.Millisecond):
			}
		}
	}
	return emit(key, value)
}

func init() { coproc.Register("deed", "does what keys say", func() coproc.Plugin { return deed{} }) }

func main() { worker.Main() }
