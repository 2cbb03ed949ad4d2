package job

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/sys"

	"github.com/quarrystore/quarry/coproc"
)

// TestHostCallsEndWithTheContext: a module that only calls the host is ended at the next call, not after as many as it may
// have loops between two checks.
func TestHostCallsEndWithTheContext(t *testing.T) {
	nothing := []byte{0x41, 1, 0x41, 0, 0x41, 0, 0x41, 8, 0x10, 0, 0x1a} // fd_write(1, 0, 0, 8): no bytes
	for name, cfg := range map[string]wazero.RuntimeConfig{"interpreted": wazero.NewRuntimeConfigInterpreter(), "compiled": wazero.NewRuntimeConfig()} {
		t.Run(name, func(t *testing.T) {
			r := newRuntime(t.Context(), cfg, 4*wasmPage)
			defer r.close()
			code, err := r.compile(t.Context(), plugin(about, join(says, nothing, []byte{0})...), describeTimeout) // 0: unreachable
			require.NoError(t, err)
			start := func(ctx context.Context, said io.Writer) error {
				_, err := r.InstantiateModule(ctx, code, wazero.NewModuleConfig().WithName("").WithStdout(said))
				return err
			}
			require.ErrorContains(t, start(t.Context(), io.Discard), "unreachable")
			ctx, cancel := context.WithCancel(t.Context())
			err = start(ctx, writer(func(b []byte) { cancel() }))
			var exit *sys.ExitError
			require.ErrorAs(t, err, &exit, "the second call of the host ended it")
			require.Equal(t, sys.ExitCodeContextCanceled, exit.ExitCode())
		})
	}
}

type writer func(b []byte)

func (w writer) Write(b []byte) (int, error) {
	w(b)
	return len(b), nil
}

// TestAWriteEndsWithTheContext: one write may have any number of frames.
func TestAWriteEndsWithTheContext(t *testing.T) {
	gone := errors.New("gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	frames := 0
	g := &guest{ctx: ctx, in: make([]byte, 8), handle: func(*guest, byte, []byte, []byte) error {
		frames++
		cancel(gone)
		return nil
	}}
	_, err := g.Write(bytes.Repeat(coproc.AppendFrame(nil, coproc.FrameProgress, make([]byte, 16), nil), 1000))
	require.ErrorIs(t, err, gone)
	require.Equal(t, 1, frames)
	_, err = g.Read(make([]byte, 8))
	require.ErrorIs(t, err, gone)
	_, err = (&tail{ctx: ctx}).Write([]byte("x"))
	require.ErrorIs(t, err, gone)
}

// TestRandomNumbersComeInPieces: a module may ask for all of its memory's bytes at once.
func TestRandomNumbersComeInPieces(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	r := &randoms{ctx, rand.NewChaCha8([32]byte{})}
	b := make([]byte, 1<<20)
	n, err := r.Read(b)
	require.NoError(t, err)
	require.Equal(t, inputBytes, n)
	cancel()
	_, err = r.Read(b)
	require.ErrorIs(t, err, context.Canceled)
}

// TestOneAnswerAtATime: answers that a module does not read would be outside of the memory that it may have.
func TestOneAnswerAtATime(t *testing.T) {
	r := newRuntime(t.Context(), wazero.NewRuntimeConfigInterpreter(), 4*wasmPage)
	defer r.close()
	call := coproc.AppendFrame(nil, coproc.FrameCall, []byte(`{"op":"nothing"}`), nil)
	done := coproc.AppendFrame(nil, coproc.FrameDone, nil, nil)
	for want, said := range map[string][]byte{"": join(call, done), "a call before the answer to the last one is read": join(call, call, done)} {
		code, err := r.compile(t.Context(), plugin(said, says...), describeTimeout)
		require.NoError(t, err)
		m := &module{rt: r, code: code}
		e := &env{ctx: t.Context(), job: &Job{}, w: &worker{Config: Config{ModuleBytes: 4 * wasmPage}}}
		err = m.part(e, nil, nil)
		if want == "" {
			require.NoError(t, err)
		} else {
			require.ErrorIs(t, err, coproc.ErrFrame)
			require.ErrorContains(t, err, want)
		}
	}
	g := &guest{ctx: t.Context()}
	g.answer(make([]byte, 100), nil)
	for g.owed > 0 {
		_, err := g.Read(make([]byte, 7))
		require.NoError(t, err)
	}
	require.Empty(t, g.in)
}

// TestWaitingToCompileEndsWithThePart: another module may take as long as it has.
func TestWaitingToCompileEndsWithThePart(t *testing.T) {
	w := &worker{compiling: make(chan struct{}, 1)}
	end, err := w.mayCompile(t.Context())
	require.NoError(t, err)
	gone := errors.New("gone")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(gone)
	_, err = w.mayCompile(ctx)
	require.ErrorIs(t, err, gone)
	end()
	_, err = w.mayCompile(t.Context())
	require.NoError(t, err)
}
