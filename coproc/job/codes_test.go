package job

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tetratelabs/wazero"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
)

// TestAModuleIsCompiledOnce: calls of a module that waits to be compiled do not queue up, and a failure is the answer for a while.
func TestAModuleIsCompiledOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &worker{compiling: make(chan struct{}, 1)}
		end, err := w.mayCompile(t.Context())
		require.NoError(t, err)
		var k codes
		began, broken := 0, errors.New("broken")
		compile := func() error {
			began++
			end, err := w.mayCompile(context.Background())
			if err != nil {
				return err
			}
			defer end()
			if began == 1 {
				return broken
			}
			return nil
		}
		for range 20 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			err := k.get(ctx, "hash", compile)
			cancel()
			require.ErrorIs(t, err, client.ErrBusy)
		}
		synctest.Wait() // the compilation waits for its turn
		require.Equal(t, 1, began)
		end()
		k.compiles.Wait()
		err = k.get(t.Context(), "hash", compile)
		require.ErrorIs(t, err, broken)
		require.Equal(t, 1, began, "the failure is kept")
		time.Sleep(failureKept) // on the clock of the test
		require.NoError(t, k.get(t.Context(), "hash", compile))
		require.Equal(t, 2, began)
		require.Empty(t, k.byHash, "the shelf has it")
	})
}

// panics is a program that panics outside of its plugin.
type panics struct{ program }

func (panics) mapPart(*env, records, coproc.Emit) error { panic("at the disco") }

// TestPanicsOfFunctionsAreErrors: neither a compilation nor a call ends the worker.
func TestPanicsOfFunctionsAreErrors(t *testing.T) {
	var k codes
	err := k.get(t.Context(), "hash", func() error { panic("out of luck") })
	require.ErrorContains(t, err, "panics: out of luck")
	require.ErrorContains(t, applyTo(panics{}, nil, nil, nil).err, "panics: at the disco")
}

// closes counts how often machine code is closed.
type closes struct {
	wazero.CompiledModule
	n int
}

func (c *closes) Close(context.Context) error { c.n++; return nil }

// TestMachineCodeIsFreed: so many modules have some, those that were used last, and one that is in use keeps it until then.
func TestMachineCodeIsFreed(t *testing.T) {
	s := shelf{most: 2}
	var all []*closes
	add := func(hash string) (release func()) {
		c := &closes{}
		all = append(all, c)
		return s.put(hash, &module{code: c})
	}
	closed := func() (n []int) {
		for _, c := range all {
			n = append(n, c.n)
		}
		return n
	}
	a, b := add("a"), add("b")
	b()
	b()
	_, again := s.take("a")
	again()
	c := add("c")
	c()
	require.Equal(t, []int{0, 1, 0}, closed(), "b was used longest ago")
	gone, _ := s.take("b")
	require.Nil(t, gone)
	_, more := s.take("c")
	more()
	add("d")()
	require.Equal(t, []int{0, 1, 0, 0}, closed(), "a is dropped, and in use")
	a()
	require.Equal(t, []int{1, 1, 0, 0}, closed())
	s.close()
	require.Equal(t, []int{1, 1, 1, 1}, closed())
}
