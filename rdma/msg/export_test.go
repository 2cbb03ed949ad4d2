package msg

import (
	"context"
)

// SetPause replaces what a client does between two looks.
func (c *Client) SetPause(f func(ctx context.Context, try int) error) { c.pause = f }

// SetLooks sets how often a client looks before it sleeps.
func (c *Client) SetLooks(n int) { c.looks = n }

// ErrFormat is what a torn message is.
var ErrFormat = errFormat

// Encode and Decode are the format, for the fuzz test.
func Encode(slot []byte, cookie uint64, procedure, status uint16, payload []byte, request bool) int {
	m := message{cookie: cookie, procedure: procedure, status: status, payload: payload}
	return m.put(slot, seedOf(request))
}

func Decode(b []byte, cookie uint64, request bool) (procedure, status uint16, payload []byte, err error) {
	m, err := decode(b, cookie, seedOf(request))
	return m.procedure, m.status, m.payload, err
}

func seedOf(request bool) uint64 {
	if request {
		return requestSeed
	}
	return answerSeed
}

// RequestOff and ValidOff are where a slot and its valid word lie.
func RequestOff(slot uint64) uint64 { return requestOff(slot) }

const ValidOff = validOff

// AnswerOff is where the answer of a slot lies.
func AnswerOff(slot uint64) uint64 { return answerOff(slot) }
