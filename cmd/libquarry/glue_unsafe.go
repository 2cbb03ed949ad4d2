package main

/*
#include "types.h"
*/
import "C"

import (
	"fmt"
	"unsafe"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto"
)

// The numbers of quarry.h and of this package are equal: an index that is not 0 does not compile.
var _ = [...]struct{}{
	[1]struct{}{}[C.QUARRY_DONE-done], [1]struct{}{}[C.QUARRY_NOT_DONE-notDone], [1]struct{}{}[C.QUARRY_UNKNOWN-unknown],
	[1]struct{}{}[C.QUARRY_NONE-reasonNone], [1]struct{}{}[C.QUARRY_OTHER-reasonOther],
	[1]struct{}{}[C.QUARRY_ARGUMENT-reasonArgument], [1]struct{}{}[C.QUARRY_CLOSED-reasonClosed],
	[1]struct{}{}[C.QUARRY_BUFFER-reasonBuffer], [1]struct{}{}[C.QUARRY_STOPPED-reasonStopped],
	[1]struct{}{}[C.QUARRY_BAD_REF-reasonBadRef], [1]struct{}{}[C.QUARRY_FREED-reasonFreed],
	[1]struct{}{}[C.QUARRY_CONFLICT-reasonConflict], [1]struct{}{}[C.QUARRY_IMMUTABLE-reasonImmutable],
	[1]struct{}{}[C.QUARRY_TOO_LARGE-reasonTooLarge], [1]struct{}{}[C.QUARRY_NO_SPACE-reasonNoSpace],
	[1]struct{}{}[C.QUARRY_BUSY-reasonBusy], [1]struct{}{}[C.QUARRY_CORRUPT-reasonCorrupt],
	[1]struct{}{}[C.QUARRY_TENANT-reasonTenant], [1]struct{}{}[C.QUARRY_KEY-reasonKey],
	[1]struct{}{}[C.QUARRY_READ_ONLY-reasonReadOnly], [1]struct{}{}[C.QUARRY_NOT_FOUND-reasonNotFound],
	[1]struct{}{}[C.QUARRY_EXISTS-reasonExists], [1]struct{}{}[C.QUARRY_UNREACHABLE-reasonUnreachable],
	[1]struct{}{}[C.QUARRY_FENCED-reasonFenced], [1]struct{}{}[C.QUARRY_LEASE-reasonLease],
	[1]struct{}{}[C.QUARRY_LOST_ANSWER-reasonLostAnswer],
	[1]struct{}{}[C.sizeof_quarry_space_info-32],
	[1]struct{}{}[C.QUARRY_MAX_OBJECT_BYTES-client.MaxObjectBytes],
	[1]struct{}{}[C.QUARRY_VOLATILE-client.Volatile], [1]struct{}{}[C.QUARRY_DURABLE-client.Durable],
}

// answer stores an error in *e, unless e is NULL, and returns its answer.
func answer(e *C.quarry_error, err error) C.int {
	a, why := answerOf(err)
	if e == nil {
		return C.int(a)
	}
	e.reason = C.int32_t(why)
	n := 0
	if err != nil {
		room := unsafe.Slice((*byte)(unsafe.Pointer(&e.text[0])), len(e.text)-1)
		n = copy(room, err.Error())
	}
	e.text[n] = 0
	return C.int(a)
}

// answerMany is answer for a call with many items, with an answer for each unless answers is NULL.
func answerMany(e *C.quarry_error, answers *C.int, errs []error) C.int {
	if answers != nil {
		each := unsafe.Slice(answers, len(errs))
		for i, err := range errs {
			a, _ := answerOf(err)
			each[i] = C.int(a)
		}
	}
	return answer(e, worst(errs))
}

// argument is the error for an argument that is outside its range.
func argument(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{client.ErrArgument}, args...)...)
}

// text is a string of C. name says which argument it is.
func text(name string, s *C.quarry_text) (string, error) {
	if s == nil {
		return "", argument("%s is NULL", name)
	}
	return C.GoString((*C.char)(unsafe.Pointer(s))), nil
}

// memory is n bytes of the caller's, which are used during the call alone.
func memory(name string, p unsafe.Pointer, n C.size_t) ([]byte, error) {
	switch {
	case n > C.QUARRY_MAX_OBJECT_BYTES:
		return nil, fmt.Errorf("%w: %s has %d bytes, and the limit is %d", client.ErrTooLarge, name, n, client.MaxObjectBytes)
	case p == nil && n > 0:
		return nil, argument("%s is NULL, and has %d bytes", name, n)
	case p == nil:
		return []byte{}, nil
	}
	return unsafe.Slice((*byte)(p), n), nil
}

// array is an array of count items of the caller's.
func array[T any](name string, p *T, count C.size_t) ([]T, error) {
	switch {
	case count > C.QUARRY_MAX_ITEMS:
		return nil, argument("%d items, and the limit of one call is %d", count, C.QUARRY_MAX_ITEMS)
	case p == nil && count > 0:
		return nil, argument("%s is NULL, with %d items", name, count)
	}
	return unsafe.Slice(p, count), nil
}

// items are arrays of bytes of the caller's, which two arrays of C describe.
func items(name string, p *C.quarry_item, bytes *C.quarry_length, count C.size_t) ([][]byte, error) {
	pointers, err := array(name, p, count)
	if err != nil {
		return nil, err
	}
	lengths, err := array("the lengths of "+name, bytes, count)
	if err != nil {
		return nil, err
	}
	all := make([][]byte, count)
	for i := range all {
		if all[i], err = memory(name, unsafe.Pointer(pointers[i]), C.size_t(lengths[i])); err != nil {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
	}
	return all, nil
}

func references(p *C.quarry_refs, count C.size_t) ([]client.Ref, error) {
	from, err := array("refs", p, count)
	if err != nil {
		return nil, err
	}
	refs := make([]client.Ref, count)
	for i, r := range from {
		refs[i] = refOf(C.quarry_ref(r))
	}
	return refs, nil
}

func refOf(r C.quarry_ref) client.Ref {
	return client.Ref{Addr: proto.Addr(r.address), Incarnation: proto.Incarnation(r.incarnation)}
}

func toRef(r client.Ref) C.quarry_ref {
	return C.quarry_ref{address: C.uint64_t(r.Addr), incarnation: C.uint64_t(r.Incarnation)}
}

// start is a pointer to b's first byte, for C, which uses it during a call: NULL if there is none.
func start(b []byte) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

// deliver copies what was read to the caller's buffer, unless it was read into that, and stores its length.
func deliver(buffer, got []byte, n *C.size_t) error {
	if n != nil {
		*n = C.size_t(len(got))
	}
	switch {
	case len(got) > len(buffer):
		return fmt.Errorf("%w: %d bytes, and %d are needed", errBuffer, len(buffer), len(got))
	case len(got) > 0 && start(got) != start(buffer):
		copy(buffer, got)
	}
	return nil
}

// taker gives the answers for many items to a function of C.
func taker(take C.quarry_take, user unsafe.Pointer, errs []error) func(i int, payload []byte, err error) {
	var e C.quarry_error
	return func(i int, payload []byte, err error) {
		errs[i] = err
		a := answer(&e, err)
		C.call_take(take, user, C.size_t(i), a, start(payload), C.size_t(len(payload)), &e)
	}
}
