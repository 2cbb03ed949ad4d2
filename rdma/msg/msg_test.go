package msg_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/stretchr/testify/require"
)

var le = binary.LittleEndian

// words is a mailbox in plain memory, for one goroutine.
type words struct{ b []byte }

func newWords() *words { return &words{make([]byte, msg.MailboxBytes)} }

func (w *words) Word(off uint64) uint64     { return le.Uint64(w.b[off:]) }
func (w *words) Set(off, word uint64)       { le.PutUint64(w.b[off:], word) }
func (w *words) Load(off uint64, b []byte)  { copy(b, w.b[off:]) }
func (w *words) Store(off uint64, b []byte) { copy(w.b[off:], b) }
func (w *words) request(slot uint64) []byte { return w.b[msg.RequestOff(slot):][:msg.SlotBytes] }
func (w *words) put(cookie uint64, p []byte) {
	msg.Encode(w.request(cookie%msg.Slots), cookie, 1, 0, p, true)
}

// What a correct client does not write is an offence, and none of it is executed.
func TestOffences(t *testing.T) {
	const nonce = 5
	cookie := func(sequence uint64) uint64 { return nonce<<40 | sequence }
	for name, spoil := range map[string]func(w *words){
		"payload under another checksum": func(w *words) { w.request(1)[30] ^= 1 },
		"head under another checksum":    func(w *words) { w.request(1)[16] ^= 1 },
		"cookie of another call":         func(w *words) { w.request(1)[8] ^= 16 },
		"length above the slot":          func(w *words) { le.PutUint32(w.request(1)[20:], msg.MaxPayload+1) },
		"length of 4 GiB":                func(w *words) { le.PutUint32(w.request(1)[20:], 1<<32-1) },
		"an answer for a request":        func(w *words) { msg.Encode(w.request(1), cookie(1), 1, 0, []byte("x"), false) },
		"another attempt":                func(w *words) { msg.Encode(w.request(1), (nonce+1)<<40|1, 1, 0, []byte("x"), true) },
		"a slot of another sequence":     func(w *words) { msg.Encode(w.request(1), cookie(2), 1, 0, []byte("x"), true) },
	} {
		w := newWords()
		s := msg.NewServer(w, nonce)
		w.put(cookie(1), []byte("request"))
		spoil(w)
		n, err := s.Serve(func(uint16, []byte, []byte) (int, error) {
			t.Errorf("%s: executed", name)
			return 0, nil
		}, nil)
		require.ErrorIs(t, err, msg.ErrOffence, name)
		require.Zero(t, n, name)
	}
	w := newWords()
	s := msg.NewServer(w, nonce)
	run := func(_ uint16, q, a []byte) (int, error) { return copy(a, q), nil }
	w.put(cookie(17), []byte("later"))
	n, err := s.Serve(run, nil)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	w.put(cookie(1), []byte("earlier"))
	_, err = s.Serve(run, nil)
	require.ErrorIs(t, err, msg.ErrOffence, "a cookie that falls")
}

// A mailbox that another one's memory is used for starts empty.
func TestNewMailboxIsEmpty(t *testing.T) {
	w := newWords()
	s := msg.NewServer(w, 5)
	w.put(5<<40|3, []byte("request"))
	n, err := s.Serve(func(_ uint16, q, a []byte) (int, error) { return copy(a, q), nil }, nil)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	w.put(5<<40|4, []byte("not served"))
	s = msg.NewServer(w, 5)
	n, err = s.Serve(func(uint16, []byte, []byte) (int, error) { return 0, errors.New("executed") }, nil)
	require.NoError(t, err)
	require.Zero(t, n)
	for slot := range uint64(2 * msg.Slots) {
		require.Zero(t, w.Word(msg.RequestOff(slot)+msg.ValidOff))
	}
}

// FuzzMessage: whatever lies in a slot, decoding it reads nothing beyond it; and what was encoded comes back.
func FuzzMessage(f *testing.F) {
	slot := make([]byte, msg.SlotBytes)
	msg.Encode(slot, 1<<40|1, 2, 3, []byte("payload"), true)
	f.Add(bytes.Clone(slot[:64]), uint64(1<<40|1), uint16(2), uint16(3))
	f.Add([]byte{}, uint64(0), uint16(0), uint16(0))
	f.Fuzz(func(t *testing.T, b []byte, cookie uint64, procedure, status uint16) {
		slot := make([]byte, msg.SlotBytes)
		copy(slot, b)
		if _, _, payload, err := msg.Decode(slot, cookie, true); err == nil {
			require.LessOrEqual(t, len(payload), msg.MaxPayload)
			_, _, _, err = msg.Decode(slot, cookie, false)
			require.Error(t, err, "a request that is an answer too")
		}
		payload := b[:min(len(b), msg.MaxPayload)]
		n := msg.Encode(slot, cookie, procedure, status, payload, true)
		p, s, got, err := msg.Decode(slot[:n], cookie, true)
		require.NoError(t, err)
		require.Equal(t, procedure, p)
		require.Equal(t, status, s)
		require.True(t, bytes.Equal(payload, got))
		_, _, _, err = msg.Decode(slot[:n], cookie+1, true)
		require.Error(t, err)
	})
}

// A call that its procedure holds is asked again each time that the node looks, is answered once, and keeps no other call from
// being answered. A Reset refuses it.
func TestHeldCall(t *testing.T) {
	const nonce = 5
	w := newWords()
	s := msg.NewServer(w, nonce)
	hold, asked := true, 0
	run := func(_ uint16, q, a []byte) (int, error) {
		if string(q) != "wait" {
			return copy(a, q), nil
		}
		if asked++; hold {
			return 0, msg.ErrHeld
		}
		return copy(a, "came"), nil
	}
	serve := func(want int) {
		t.Helper()
		n, err := s.Serve(run, nil)
		require.NoError(t, err)
		require.Equal(t, want, n)
	}
	answer := func(sequence uint64) (status uint16, text string) {
		cookie := uint64(nonce<<40) | sequence
		b := w.b[msg.AnswerOff(sequence%msg.Slots):][:msg.SlotBytes]
		if le.Uint64(b[msg.ValidOff:]) != cookie {
			return 99, ""
		}
		_, status, payload, err := msg.Decode(b, cookie, false)
		require.NoError(t, err)
		return status, string(payload)
	}
	w.put(nonce<<40|1, []byte("wait"))
	serve(1)
	w.put(nonce<<40|2, []byte("other"))
	serve(1)
	w.put(nonce<<40|3, []byte("wait"))
	serve(1)
	status, _ := answer(1)
	require.EqualValues(t, 99, status, "held")
	_, text := answer(2)
	require.Equal(t, "other", text)
	status, text = answer(3)
	require.EqualValues(t, 2, status)
	require.Contains(t, text, "holds another call")
	hold = false
	serve(1)
	_, text = answer(1)
	require.Equal(t, "came", text)
	before := asked
	serve(0)
	require.Equal(t, before, asked, "it was answered")

	hold = true
	w.put(nonce<<40|4, []byte("wait"))
	serve(1)
	s.Resume()
	hold = false
	serve(0)
	status, text = answer(4)
	require.EqualValues(t, 2, status)
	require.Contains(t, text, "reset")
}
