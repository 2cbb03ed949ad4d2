package coproc_test

import (
	"bufio"
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/coproc"
)

func TestFramesParseBack(t *testing.T) {
	b := coproc.AppendFrame(nil, coproc.FrameRecord, []byte("key"), []byte("value"))
	b = coproc.AppendFrame(b, coproc.FrameEnd, nil, nil)
	r := bufio.NewReader(bytes.NewReader(b))
	kind, x, y, buf, err := coproc.ReadFrame(r, nil)
	require.NoError(t, err)
	require.EqualValues(t, coproc.FrameRecord, kind)
	require.Equal(t, "key", string(x))
	require.Equal(t, "value", string(y))
	kind, x, y, _, err = coproc.ReadFrame(r, buf)
	require.NoError(t, err)
	require.EqualValues(t, coproc.FrameEnd, kind)
	require.Empty(t, x)
	require.Empty(t, y)
}

// What a guest says is not trusted: a frame is whole, missing more, or malformed,
// and its parts lie within what was given.
func FuzzCutFrame(f *testing.F) {
	f.Add(coproc.AppendFrame(nil, coproc.FrameEmit, []byte("k"), []byte("v")))
	f.Add([]byte{coproc.FrameEmit, 255, 255, 255, 255, 255, 255, 255, 255})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		kind, x, y, rest, ok, err := coproc.CutFrame(b)
		if err != nil || !ok {
			require.Equal(t, b, rest)
			return
		}
		require.Equal(t, b, append(coproc.AppendFrame(nil, kind, x, y), rest...))
	})
}

func FuzzCutRecord(f *testing.F) {
	f.Add(coproc.AppendRecord(nil, []byte("k"), []byte("v")))
	f.Add([]byte{200, 1, 2})
	f.Fuzz(func(t *testing.T, b []byte) {
		key, value, rest, ok := coproc.CutRecord(b)
		if !ok {
			require.Equal(t, b, rest)
			return
		}
		again, v, left, ok := coproc.CutRecord(coproc.AppendRecord(nil, key, value))
		require.True(t, ok)
		require.Empty(t, left)
		require.Equal(t, key, again)
		require.Equal(t, value, v)
		require.LessOrEqual(t, len(key)+len(value)+len(rest), len(b))
	})
}

func TestRegisteringTwiceIsAMistake(t *testing.T) {
	make := func() coproc.Plugin { return nil }
	require.Panics(t, func() { coproc.Register("", "", make) })
	require.Panics(t, func() { coproc.Register("x", "", nil) })
}
