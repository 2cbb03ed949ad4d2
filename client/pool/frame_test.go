package pool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
)

// FuzzRequest: bytes are refused, or are a request within the limits that its own encoding gives again.
func FuzzRequest(f *testing.F) {
	f.Add(append(appendFrame(nil, opPersist, 7, 11), "\x10\x00\x00\x00\x00\x00\x00\x00abc"...))
	f.Add(append(appendFrame(nil, opCompare, 1<<60, 24), bytes.Repeat([]byte{1}, 24)...))
	c := control{Name: "p", Bytes: 1, Attr: encodeAttr(Attr{Major: 1}), Token: "t", Info: &Info{}}.encode()
	f.Add(append(appendFrame(nil, opCreate, 0, len(c)), c...))
	f.Add([]byte(agentMagic))
	buf := make([]byte, maxBody)
	f.Fuzz(func(t *testing.T, b []byte) {
		if version, lanes, err := readGreeting(bytes.NewReader(b)); err == nil && version == agentVersion {
			require.True(t, bytes.HasPrefix(b, greeting(lanes)))
		}
		r, err := readFrame(bytes.NewReader(b), buf)
		if err != nil {
			return
		}
		require.LessOrEqual(t, len(r.body), maxBody)
		require.True(t, bytes.HasPrefix(b, append(appendFrame(nil, r.kind, r.id, len(r.body)), r.body...)))
		if isControl(r.kind) {
			c, err := decodeControl(r.body)
			if err != nil {
				require.Equal(t, control{}, c)
				return
			}
			again, err := decodeControl(c.encode())
			require.NoError(t, err)
			require.Equal(t, c.encode(), again.encode())
			if a, err := c.attr(); err == nil {
				require.Equal(t, c.Attr, encodeAttr(a))
			}
			return
		}
		off, n, count, data, err := r.span()
		if err != nil {
			require.ErrorIs(t, err, errFrame)
			return
		}
		if r.kind != opFlush {
			require.LessOrEqual(t, n*max(1, count), uint64(maxData))
		}
		require.LessOrEqual(t, count, uint64(parts))
		switch r.kind {
		case opPersist, opDeepPersist:
			require.Equal(t, r.body, append(appendWords(nil, off), data...))
		case opRead, opFlush:
			require.Equal(t, r.body, appendWords(nil, off, n))
		case opCompare:
			require.Equal(t, r.body, appendWords(nil, off, n, count))
		}
	})
}

// nowhere is standard input of an agent that is not there.
type nowhere struct{}

func (nowhere) Write(b []byte) (int, error) { return len(b), nil }
func (nowhere) Close() error                { return nil }

// FuzzAnswers: whatever a host writes, each call ends, once, and those that ask for bytes get as many.
func FuzzAnswers(f *testing.F) {
	ok := greeting(streamLanes)
	f.Add(append(appendFrame(bytes.Clone(ok), frameDone, 1, 5), "bytes"...))
	f.Add(append(appendFrame(bytes.Clone(ok), frameDone, 2, 2), "{}"...))
	refused := encodeError(fmt.Errorf("%w: x: %w", client.ErrUnknown, ErrOpen))
	f.Add(append(appendFrame(bytes.Clone(ok), frameFailed, 3, len(refused)), refused...))
	f.Add(appendFrame(appendFrame(bytes.Clone(ok), frameAlive, 0, 0), frameDone, 3, 0))
	f.Add(append(appendFrame(bytes.Clone(ok), frameFailed, 0, len(refused)), refused...))
	f.Add([]byte("Welcome to this host"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s := &stream{host: "u@h", in: nowhere{}, calls: map[uint64]*remoteCall{}, ended: make(chan struct{}), gone: make(chan struct{})}
		close(s.gone) // there is no process to end
		calls := []*remoteCall{{body: make([]byte, 5)}, {take: true}, {}}
		for i, c := range calls {
			c.answer = make(chan error, 1)
			s.calls[uint64(i+1)] = c
		}
		err := s.answers(bytes.NewReader(b), make(chan struct{}), func() {})
		require.Error(t, err)
		s.fail(err)
		for i, c := range calls {
			err := <-c.answer
			var is *remoteError
			require.True(t, err == nil || errors.Is(err, errStream) || errors.As(err, &is), "%v", err)
			require.Empty(t, c.answer)
			if err == nil {
				require.True(t, i == 1 && len(c.body) <= maxControl || len(c.body) == []int{5, 0, 0}[i])
			}
		}
	})
}

// TestErrorsOfAgents: an error of an agent is the same one here, with its text.
func TestErrorsOfAgents(t *testing.T) {
	for i, s := range sentinels {
		for _, err := range []error{s, fmt.Errorf("%w: %w", client.ErrUnknown, s)} {
			got := decodeError(encodeError(err))
			require.Equal(t, err.Error(), got.Error())
			require.ErrorIs(t, got, s)
			for k, other := range sentinels {
				require.Equal(t, errors.Is(err, other), errors.Is(got, other), "%d as %d", i, k)
			}
		}
	}
	got := decodeError(encodeError(errors.New(strings.Repeat("x", 2*maxErrorText))))
	require.Len(t, got.Error(), maxErrorText)
	require.NotErrorIs(t, got, client.ErrUnknown)
	for _, bad := range [][]byte{nil, make([]byte, 7), make([]byte, 9+maxErrorText), bytes.Repeat([]byte{255}, 8)} {
		require.ErrorIs(t, decodeError(bad), errFrame)
	}
}

// TestCallsOfAStreamThatEnds: what may have changed something is unknown, and what has not been sent is not done.
func TestCallsOfAStreamThatEnds(t *testing.T) {
	r, w := io.Pipe()
	s := &stream{host: "u@h", in: w, calls: map[uint64]*remoteCall{}, lanes: make(chan struct{}, streamLanes), ended: make(chan struct{}), gone: make(chan struct{})}
	close(s.gone)
	errs := make(chan error, 2)
	for _, op := range []byte{opPersist, opRead} {
		go func() { errs <- s.do(context.Background(), op, []uint64{0}, []byte("abc"), nil) }()
		_, err := io.CopyN(io.Discard, r, frameBytes+8+3)
		require.NoError(t, err)
	}
	s.fail(errors.New("a reason"))
	unknown := 0
	for range 2 {
		err := <-errs
		require.ErrorIs(t, err, ErrAgent)
		require.ErrorContains(t, err, "u@h: a reason")
		if errors.Is(err, client.ErrUnknown) {
			unknown++
		}
	}
	require.Equal(t, 1, unknown, "the Persist, and not the Read")
	err := s.do(context.Background(), opPersist, []uint64{0}, nil, nil)
	require.ErrorIs(t, err, ErrAgent)
	require.NotErrorIs(t, err, client.ErrUnknown)
}
