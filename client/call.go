package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma/msg"
)

const (
	// MaxFunctionArgs and MaxFunctionAnswer bound what Call carries, in bytes.
	MaxFunctionArgs   = msg.MaxFunctionArgs
	MaxFunctionAnswer = msg.MaxFunctionAnswer
	// callTime is how long a node waits for the worker.
	callTime = time.Second
)

// Call has a worker beside the node of the object's primary call a function on the object: a plugin that is compiled into the worker, or an
// uploaded module. The function is given the payload and args. It may return a new payload, which replaces the old one if the object has not
// changed meanwhile; otherwise the function is called again. Call returns the function's answer.
//
// The function is given the object and nothing else of the cluster, and has a second.
//
// Errors: ErrNoFunction, ErrFunction, ErrBusy, ErrFreed, ErrBadRef, ErrImmutable, ErrTooLarge, ErrReadOnly, ErrArgument, ErrUnreachable. After ErrUnknown the object may have been
// replaced, once.
func (c *Client) Call(ctx context.Context, ref Ref, function string, args []byte) (answer []byte, err error) {
	switch {
	case c.cfg.ReadOnly:
		return nil, ErrReadOnly
	case function == "" || len(function) > msg.MaxFunctionName:
		return nil, fmt.Errorf("%w: function %q: want a name of 1 to %d bytes", ErrArgument, function, msg.MaxFunctionName)
	case len(args) > MaxFunctionArgs:
		return nil, fmt.Errorf("%w: arguments of %d bytes, at most %d", ErrTooLarge, len(args), MaxFunctionArgs)
	}
	err = c.onLane(ctx, KindUpdate, func(l *lane) error {
		answer, err = l.callFunction(ref, function, args)
		return err
	})
	return answer, err
}

// callFunction is Call on a lane.
func (l *lane) callFunction(ref Ref, function string, args []byte) ([]byte, error) {
	q := msg.ObjectRequest{Op: msg.ObjectCall, Ref: ref, Payload: msg.AppendFunction(nil, function, args)}
	for attempt := 1; ; attempt++ {
		if q.Wait = min(callTime, time.Duration(l.until()-clock.Now())).Truncate(time.Millisecond); q.Wait <= 0 {
			return nil, fmt.Errorf("%w: function %q: no time is left", ErrUnreachable, function)
		}
		a, _, err := l.ask(&q)
		switch {
		case err == nil && a.Outcome == msg.Done:
			return append([]byte(nil), a.Payload...), nil
		case err == nil && a.Outcome == msg.Unknown:
			return nil, fmt.Errorf("%w: function %q: %s", ErrUnknown, function, a.Payload)
		case err == nil && a.Reason != msg.Elsewhere:
			return nil, fmt.Errorf("%w: function %q: %s", errorOf(a.Reason), function, a.Payload)
		case err == nil:
			err = fmt.Errorf("%w: %s", errNotYet, a.Payload)
		case earlier(err):
			return nil, fmt.Errorf("%w: the node runs an earlier version: %w", ErrNoFunction, err)
		case !errors.Is(err, errNotYet):
			return nil, err
		}
		if ended := l.backOff(attempt); ended != nil {
			return nil, fmt.Errorf("%w: function %q: %w: %w", ErrUnreachable, function, err, ended)
		}
		if !errors.Is(err, errAskLater) {
			_ = l.session.refresh(l.ctx)
		}
	}
}

// earlier says whether a call fails because its node runs a version that knows no calls of functions, or no changes of objects.
func earlier(err error) bool { return errors.Is(err, msg.ErrProcedure) || refused(err) }

// errorOf is the error of a reason.
func errorOf(r msg.Reason) error {
	switch r {
	case msg.NoFunction:
		return ErrNoFunction
	case msg.Busy, msg.Conflict:
		return ErrBusy
	case msg.Freed:
		return ErrFreed
	case msg.BadRef:
		return ErrBadRef
	case msg.Immutable:
		return ErrImmutable
	case msg.TooLarge:
		return ErrTooLarge
	case msg.Damaged:
		return ErrCorrupt
	case msg.Encrypted:
		return ErrKey
	}
	return ErrFunction
}

// reasonOf is the outcome and the reason that stand for an error of a call.
func reasonOf(err error) (msg.Outcome, msg.Reason) {
	if err == nil {
		return msg.Done, msg.NoReason
	}
	if errors.Is(err, ErrUnknown) {
		return msg.Unknown, msg.NoReason
	}
	for r := msg.NoReason + 1; r <= msg.Failed; r++ {
		if e := errorOf(r); e != ErrFunction && errors.Is(err, e) {
			return msg.NotDone, r
		}
	}
	return msg.NotDone, msg.Failed
}
