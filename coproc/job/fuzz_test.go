package job

import (
	"context"
	"encoding/binary"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/tetratelabs/wazero"

	"github.com/quarrystore/quarry/coproc"
)

// section is a section of a WASM module.
func section(id byte, content ...byte) []byte {
	return append(binary.AppendUvarint([]byte{id}, uint64(len(content))), content...)
}

// text is a name in a WASM module.
func text(s string) []byte { return append([]byte{byte(len(s))}, s...) }

func join(parts ...[]byte) (all []byte) {
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

// plugin is a module whose main function runs the code, with what it may write at 16 and the
// vector that describes it at 0.
func plugin(said []byte, code ...byte) []byte {
	body := join([]byte{0}, code, []byte{0x0b})
	data := binary.LittleEndian.AppendUint32([]byte{16, 0, 0, 0}, uint32(len(said)))
	data = join(data, make([]byte, 8), said)
	return join(
		[]byte("\x00asm\x01\x00\x00\x00"),
		section(1, 2, 0x60, 4, 0x7f, 0x7f, 0x7f, 0x7f, 1, 0x7f, 0x60, 0, 0),
		section(2, join([]byte{1}, text("wasi_snapshot_preview1"), text("fd_write"), []byte{0, 0})...),
		section(3, 1, 1),
		section(5, 1, 0, 1),
		section(7, join([]byte{2}, text("memory"), []byte{2, 0}, text("_start"), []byte{0, 1})...),
		section(10, join([]byte{1}, binary.AppendUvarint(nil, uint64(len(body))), body)...),
		section(11, join([]byte{1, 0, 0x41, 0, 0x0b}, binary.AppendUvarint(nil, uint64(len(data))), data)...),
	)
}

var (
	says  = []byte{0x41, 1, 0x41, 0, 0x41, 1, 0x41, 8, 0x10, 0, 0x1a} // fd_write(1, 0, 1, 8)
	loops = []byte{0x03, 0x40, 0x0c, 0, 0x0b}                         // for {}
	about = coproc.AppendFrame(nil, coproc.FrameAbout, []byte(`{"name":"p","help":"h"}`), nil)
)

// describe asks a module for its About, with little memory and time.
func describe(ctx context.Context, wasm []byte) (coproc.About, error) {
	ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	r := newRuntime(ctx, wazero.NewRuntimeConfigInterpreter(), 4*wasmPage)
	defer r.close()
	return r.describe(ctx, wasm)
}

// FuzzModule: what is uploaded as a module is refused, or says what it is.
func FuzzModule(f *testing.F) {
	f.Add([]byte("\x00asm\x01\x00\x00\x00"))
	f.Add(plugin(about, says...))
	f.Add(plugin(about, append(says, says...)...))
	f.Add(plugin(about[:3], says...))
	f.Add(plugin(nil, loops...))
	f.Add(plugin([]byte{0xff, 0xff, 0xff}, says...))
	f.Fuzz(func(t *testing.T, wasm []byte) {
		a, err := describe(t.Context(), wasm)
		if err == nil {
			require.NotPanics(t, func() { encode(Module{About: a}) })
		}
	})
}

// A module that says what it is is taken: the fuzzer begins with one that works.
func TestPluginOfTheFuzzer(t *testing.T) {
	r := newRuntime(t.Context(), wazero.NewRuntimeConfigInterpreter(), 4*wasmPage)
	defer r.close()
	a, err := r.describe(t.Context(), plugin(about, says...))
	require.NoError(t, err)
	require.Equal(t, "p", a.Name)
}

// FuzzGuest: what a module writes has one meaning, in whatever pieces it comes, and ends at the
// first frame that is refused.
func FuzzGuest(f *testing.F) {
	f.Add(about, uint8(1))
	f.Add(join(coproc.AppendFrame(nil, coproc.FrameEmit, []byte("k"), []byte("v")), coproc.AppendFrame(nil, coproc.FrameDone, nil, nil)), uint8(3))
	f.Add(join(about, []byte{coproc.FrameEmit, 255, 255, 255, 255, 255, 255, 255, 255}), uint8(7))
	f.Fuzz(func(t *testing.T, said []byte, piece uint8) {
		type heard struct{ frames, err string }
		listen := func(piece int) (h heard) {
			frames := []byte(nil)
			g := &guest{ctx: t.Context(), handle: func(_ *guest, kind byte, a, b []byte) error {
				if kind == coproc.FrameDone && len(frames) > 1<<10 {
					return errors.New("enough")
				}
				frames = coproc.AppendFrame(frames, kind, a, b)
				return nil
			}}
			for rest := said; len(rest) > 0; {
				n := min(piece, len(rest))
				if _, err := g.Write(rest[:n]); err != nil {
					h.err = err.Error()
					_, again := g.Write([]byte{0})
					require.Equal(t, err, again, "it stays stopped")
					break
				}
				rest = rest[n:]
			}
			h.frames = string(frames)
			return h
		}
		require.Equal(t, listen(len(said)), listen(int(piece)+1))
	})
}
