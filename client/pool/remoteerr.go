package pool

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/client"
)

// ErrAgent: no agent runs on the host, or it has ended before this call: the call has changed nothing.
var ErrAgent = errors.New("no pool agent")

// sentinels are the errors that agents tell by their places: the order is part of the protocol.
var sentinels = []error{
	client.ErrUnknown, client.ErrArgument, client.ErrReadOnly, client.ErrNoName, client.ErrNameExists, client.ErrNoSpace, client.ErrTooLarge, client.ErrUnreachable,
	client.ErrLease, client.ErrFenced, client.ErrClosed, client.ErrConflict, client.ErrBusy, client.ErrCorrupt, client.ErrNoRegion, client.ErrTenant,
	ErrNotPool, ErrOpen, ErrMismatch, ErrUnfinished, ErrRange, ErrNotDurable, ErrClosed, context.DeadlineExceeded,
}

// A remoteError is what an agent's answer says.
type remoteError struct {
	text string
	is   []error
}

func (e *remoteError) Error() string   { return e.text }
func (e *remoteError) Unwrap() []error { return e.is }

// encodeError is the body of frameFailed.
func encodeError(err error) []byte {
	var which uint64
	for i, s := range sentinels {
		if errors.Is(err, s) {
			which |= 1 << i
		}
	}
	text := err.Error()
	return append(binary.LittleEndian.AppendUint64(nil, which), text[:min(len(text), maxErrorText)]...)
}

// decodeError reads the body of frameFailed.
func decodeError(b []byte) error {
	if len(b) < 8 || len(b) > 8+maxErrorText {
		return fmt.Errorf("%w: an error of %d bytes", errFrame, len(b))
	}
	which := binary.LittleEndian.Uint64(b)
	if which>>len(sentinels) != 0 {
		return fmt.Errorf("%w: error %x", errFrame, which)
	}
	e := &remoteError{text: string(b[8:])}
	for i, s := range sentinels {
		if which>>i&1 != 0 {
			e.is = append(e.is, s)
		}
	}
	return e
}
