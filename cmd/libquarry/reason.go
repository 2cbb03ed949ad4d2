package main

import (
	"context"
	"errors"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/vmm"
)

// Answers of quarry.h.
const (
	done    = 0
	notDone = 1
	unknown = 2
)

// A reason is one of enum quarry_reason.
type reason int32

const (
	reasonNone        reason = 0
	reasonOther       reason = 1
	reasonArgument    reason = 2
	reasonClosed      reason = 3
	reasonBuffer      reason = 4
	reasonStopped     reason = 5
	reasonBadRef      reason = 10
	reasonFreed       reason = 11
	reasonConflict    reason = 12
	reasonImmutable   reason = 13
	reasonTooLarge    reason = 14
	reasonNoSpace     reason = 15
	reasonBusy        reason = 16
	reasonCorrupt     reason = 17
	reasonTenant      reason = 18
	reasonKey         reason = 19
	reasonReadOnly    reason = 20
	reasonNotFound    reason = 21
	reasonExists      reason = 22
	reasonUnreachable reason = 23
	reasonFenced      reason = 24
	reasonLease       reason = 25
	reasonLostAnswer  reason = 26
)

var (
	errBuffer  = errors.New("the buffer is too small")
	errStopped = errors.New("the caller's function ended the call")
)

// reasons are looked through in order: an error may wrap several, and the first one counts.
var reasons = []struct {
	err error
	is  reason
}{
	{client.ErrUnknown, reasonLostAnswer},
	{errHandle, reasonClosed},
	{client.ErrClosed, reasonClosed},
	{errBuffer, reasonBuffer},
	{errStopped, reasonStopped},
	{client.ErrArgument, reasonArgument}, // ErrBadName is one
	{btree.ErrBadKey, reasonArgument},
	{client.ErrReadOnly, reasonReadOnly},
	{client.ErrNoName, reasonNotFound},
	{btree.ErrNoKey, reasonNotFound},
	{btree.ErrNoTree, reasonNotFound},
	{kv.ErrNotTree, reasonNotFound},
	{client.ErrNameExists, reasonExists},
	{btree.ErrKeyExists, reasonExists},
	{client.ErrBadRef, reasonBadRef},
	{client.ErrNoRegion, reasonBadRef},
	{client.ErrFreed, reasonFreed},
	{client.ErrConflict, reasonConflict},
	{client.ErrImmutable, reasonImmutable},
	{client.ErrTooLarge, reasonTooLarge},
	{client.ErrNoSpace, reasonNoSpace},
	{client.ErrBusy, reasonBusy},
	{client.ErrCorrupt, reasonCorrupt},
	{btree.ErrCorrupt, reasonCorrupt},
	{btree.ErrFormat, reasonCorrupt},
	{client.ErrTenant, reasonTenant},
	{client.ErrKey, reasonKey},
	{client.ErrNotEncrypted, reasonKey},
	{client.ErrNotAuthentic, reasonKey},
	{client.ErrFenced, reasonFenced},
	{client.ErrLease, reasonLease},
	{vmm.ErrMapped, reasonExists},
	{vmm.ErrLost, reasonClosed},
	{client.ErrUnreachable, reasonUnreachable},
	{vmm.ErrNoPager, reasonUnreachable},
	{context.DeadlineExceeded, reasonUnreachable},
}

// answerOf is the answer and the reason that an error stands for.
func answerOf(err error) (answer int, why reason) {
	if err == nil {
		return done, reasonNone
	}
	for _, r := range reasons {
		if errors.Is(err, r.err) {
			if r.is == reasonLostAnswer {
				return unknown, r.is
			}
			return notDone, r.is
		}
	}
	return notDone, reasonOther
}

// worst is the error that a call with many items returns: the first that is unknown, else the first.
func worst(errs []error) (first error) {
	for _, err := range errs {
		if errors.Is(err, client.ErrUnknown) {
			return err
		}
		if first == nil {
			first = err
		}
	}
	return first
}
