package main

import (
	"context"
	"errors"
	"fmt"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/worker"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/rdma"
)

// Exit codes, the same for every command.
const (
	exitOK          = 0
	exitFailed      = 1   // not done
	exitUsage       = 2   // wrong flags, arguments or configuration
	exitUnknown     = 3   // outcome unknown: may have been done, at most once
	exitNotFound    = 4   // no such name, object, region, session
	exitConflict    = 5   // exists already, or has changed meanwhile
	exitUnreachable = 6   // no controller, or no node, answers; fsck: a region was not checked
	exitNoSpace     = 7   // no room, or too large
	exitDamaged     = 8   // data is damaged; fsck: there are findings
	exitInterrupted = 130 // by Ctrl-C
)

// usageError is the caller's mistake, found before anything was done.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// usagef makes a usageError.
func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// interrupted is the end of a command by Ctrl-C that has done a part of its work, or has
// begun work that goes on without it.
type interrupted struct {
	what string // what is done, what goes on, and how to end it
}

func (e interrupted) Error() string { return "interrupted: " + e.what }
func (e interrupted) Unwrap() error { return context.Canceled }

// ifInterrupted adds to the error of an interrupted command what is left to know.
func ifInterrupted(ctx context.Context, err error, format string, args ...any) error {
	if err == nil || !errors.Is(ctx.Err(), context.Canceled) {
		return err
	}
	return interrupted{fmt.Sprintf(format, args...)}
}

// errFindings: fsck has found something.
var errFindings = errors.New("findings")

// exitCode is the exit code of a command's error. The order of the cases counts: an outcome that is unknown may
// also wrap the reason that made it so.
func exitCode(err error) int {
	var usage usageError
	var slot *worker.SlotError
	is := func(targets ...error) bool {
		for _, t := range targets {
			if errors.Is(err, t) {
				return true
			}
		}
		return false
	}
	switch {
	case errors.As(err, &usage):
		return exitUsage
	case errors.As(err, &slot) && slot.Code > 0:
		return slot.Code
	case is(client.ErrUnknown):
		return exitUnknown
	case is(client.ErrFreed, client.ErrNoName, client.ErrBadRef, client.ErrNoRegion, fsck.ErrNoRegion, btree.ErrNoKey, btree.ErrNoTree, job.ErrNoJob, job.ErrNoPlugin, client.ErrNoFunction, kv.ErrStateGone, pool.ErrNoPart):
		return exitNotFound
	case is(client.ErrConflict, client.ErrNameExists, client.ErrImmutable, btree.ErrKeyExists, btree.ErrNotEmpty, kv.ErrNamesChange, kv.ErrFeedOpen, pool.ErrOpen, pool.ErrUnfinished, pool.ErrTorn):
		return exitConflict
	case is(client.ErrUnreachable, pool.ErrAgent, fsck.ErrUnreachable, fsck.ErrUnchecked, errNoController, rdma.ErrBroken, context.DeadlineExceeded):
		return exitUnreachable
	case is(client.ErrNoSpace, client.ErrTooLarge):
		return exitNoSpace
	case is(client.ErrArgument, btree.ErrBadKey, kv.ErrNotTree, kv.ErrNotState, pool.ErrNotPool, pool.ErrNotPart, pool.ErrMismatch, fsck.ErrNoSlabs, client.ErrKey, client.ErrNotEncrypted):
		return exitUsage
	case is(client.ErrCorrupt, client.ErrNotAuthentic, btree.ErrCorrupt, btree.ErrFormat, errFindings):
		return exitDamaged
	case is(context.Canceled):
		return exitInterrupted
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		switch ce.Code() {
		case connect.CodeNotFound:
			return exitNotFound
		case connect.CodeAlreadyExists, connect.CodeAborted, connect.CodeFailedPrecondition:
			return exitConflict
		case connect.CodeUnavailable:
			return exitUnreachable
		case connect.CodeResourceExhausted:
			return exitNoSpace
		case connect.CodeInvalidArgument:
			return exitUsage
		}
	}
	return exitFailed
}
