package job

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

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
		compile := func() (program, error) {
			began++
			end, err := w.mayCompile(context.Background())
			if err != nil {
				return nil, err
			}
			defer end()
			if began == 1 {
				return nil, broken
			}
			return &module{}, nil
		}
		for range 20 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err := k.get(ctx, "hash", compile)
			cancel()
			require.ErrorIs(t, err, client.ErrBusy)
		}
		require.Equal(t, 1, began)
		end()
		k.compiles.Wait()
		_, err = k.get(t.Context(), "hash", compile)
		require.ErrorIs(t, err, broken)
		require.Equal(t, 1, began, "the failure is kept")
		time.Sleep(failureKept) // on the clock of the test
		for range 2 {
			p, err := k.get(t.Context(), "hash", compile)
			require.NoError(t, err)
			require.NotNil(t, p)
		}
		require.Equal(t, 2, began)
	})
}

// panics is a program that panics outside of its plugin.
type panics struct{ program }

func (panics) mapPart(*env, records, coproc.Emit) error { panic("at the disco") }

// TestPanicsOfFunctionsAreErrors: neither a compilation nor a call ends the worker.
func TestPanicsOfFunctionsAreErrors(t *testing.T) {
	var k codes
	_, err := k.get(t.Context(), "hash", func() (program, error) { panic("out of luck") })
	require.ErrorContains(t, err, "panics: out of luck")
	require.ErrorContains(t, applyTo(panics{}, nil, nil, nil).err, "panics: at the disco")
}
