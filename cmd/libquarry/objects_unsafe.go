package main

/*
#include "types.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"unsafe"

	"github.com/quarrystore/quarry/client"
)

//export quarry_alloc
func quarry_alloc(number C.quarry_client, payload C.quarry_bytes, n C.size_t, o *C.quarry_new_options, out *C.quarry_ref, e *C.quarry_error) C.int {
	return answer(e, alloc(number, unsafe.Pointer(payload), n, (*C.quarry_alloc_options)(unsafe.Pointer(o)), out))
}

func alloc(number C.quarry_client, payload unsafe.Pointer, n C.size_t, o *C.quarry_alloc_options, out *C.quarry_ref) error {
	c, err := clients.get(uint64(number))
	if err != nil {
		return err
	}
	if out == nil {
		return argument("ref is NULL")
	}
	b, err := memory("payload", payload, n)
	if err != nil {
		return err
	}
	var want client.AllocOptions
	if o != nil {
		if want, err = allocOptions(o); err != nil {
			return err
		}
	}
	ref, err := c.Alloc(context.Background(), b, want)
	*out = toRef(ref)
	return err
}

func allocOptions(o *C.quarry_alloc_options) (want client.AllocOptions, err error) {
	switch {
	case o.bytes != C.sizeof_quarry_alloc_options:
		return want, argument("quarry_alloc_options.bytes is %d, and this library takes %d", o.bytes, C.sizeof_quarry_alloc_options)
	case o.capacity > C.QUARRY_MAX_OBJECT_BYTES:
		return want, fmt.Errorf("%w: capacity is %d, and the limit is %d", client.ErrTooLarge, o.capacity, client.MaxObjectBytes)
	case o.durability > C.QUARRY_DURABLE || o.write_once > 1:
		return want, argument("durability is %d (0 to %d), write_once is %d (0 or 1)", o.durability, C.QUARRY_DURABLE, o.write_once)
	}
	return client.AllocOptions{
		Capacity: int(o.capacity), Tag: uint32(o.tag), Replicas: int(o.replicas),
		Durability: client.Durability(o.durability), WriteOnce: o.write_once == 1,
	}, nil
}

// into are the client of a handle and the buffer that a call fills.
func into(number C.quarry_client, buffer unsafe.Pointer, room C.size_t) (*client.Client, []byte, error) {
	c, err := clients.get(uint64(number))
	if err != nil {
		return nil, nil, err
	}
	b, err := memory("buffer", buffer, min(room, C.QUARRY_MAX_OBJECT_BYTES))
	return c, b, err
}

// from are the client of a handle and the payload that a call writes.
func from(number C.quarry_client, payload C.quarry_bytes, n C.size_t) (*client.Client, []byte, error) {
	c, err := clients.get(uint64(number))
	if err != nil {
		return nil, nil, err
	}
	b, err := memory("payload", unsafe.Pointer(payload), n)
	return c, b, err
}

//export quarry_read
func quarry_read(number C.quarry_client, ref C.quarry_ref, buffer unsafe.Pointer, room C.size_t, n *C.size_t, info *C.quarry_info, e *C.quarry_error) C.int {
	c, b, err := into(number, buffer, room)
	if err != nil {
		return answer(e, err)
	}
	var got []byte
	if info == nil {
		got, err = c.Read(context.Background(), refOf(ref), b[:0])
	} else {
		var i client.Info
		got, i, err = c.ReadInfo(context.Background(), refOf(ref), b[:0])
		*info = toInfo(i)
	}
	if err == nil {
		err = deliver(b, got, n)
	}
	return answer(e, err)
}

func toInfo(i client.Info) C.quarry_info {
	once := 0
	if i.WriteOnce {
		once = 1
	}
	return C.quarry_info{version: C.uint64_t(i.Version), bytes: C.uint64_t(i.Bytes), tag: C.uint32_t(i.Tag), write_once: C.uint32_t(once)}
}

//export quarry_read_at
func quarry_read_at(number C.quarry_client, ref C.quarry_ref, offset C.uint64_t, buffer unsafe.Pointer, room C.size_t, n *C.size_t, e *C.quarry_error) C.int {
	c, b, err := into(number, buffer, room)
	if err != nil {
		return answer(e, err)
	}
	got, err := c.ReadAt(context.Background(), refOf(ref), b, int64(min(offset, math.MaxInt64)))
	if n != nil {
		*n = C.size_t(got)
	}
	if errors.Is(err, io.EOF) {
		err = nil // the length says it
	}
	return answer(e, err)
}

//export quarry_stat
func quarry_stat(number C.quarry_client, ref C.quarry_ref, info *C.quarry_info, e *C.quarry_error) C.int {
	c, err := clients.get(uint64(number))
	if err == nil && info == nil {
		err = argument("info is NULL")
	}
	if err != nil {
		return answer(e, err)
	}
	i, err := c.Stat(context.Background(), refOf(ref))
	*info = toInfo(i)
	return answer(e, err)
}

//export quarry_write
func quarry_write(number C.quarry_client, ref C.quarry_ref, payload C.quarry_bytes, n C.size_t, e *C.quarry_error) C.int {
	c, b, err := from(number, payload, n)
	if err == nil {
		err = c.Write(context.Background(), refOf(ref), b)
	}
	return answer(e, err)
}

//export quarry_write_if
func quarry_write_if(number C.quarry_client, ref C.quarry_ref, version C.uint64_t, payload C.quarry_bytes, n C.size_t, e *C.quarry_error) C.int {
	c, b, err := from(number, payload, n)
	if err == nil {
		err = c.CompareAndWrite(context.Background(), refOf(ref), uint64(version), b)
	}
	return answer(e, err)
}

//export quarry_update
func quarry_update(number C.quarry_client, ref C.quarry_ref, room C.size_t, edit C.quarry_edit, user unsafe.Pointer, e *C.quarry_error) C.int {
	c, err := clients.get(uint64(number))
	switch {
	case err != nil:
	case edit == nil:
		err = argument("edit is NULL")
	case room > C.QUARRY_MAX_OBJECT_BYTES:
		err = fmt.Errorf("%w: room is %d, and the limit is %d", client.ErrTooLarge, room, client.MaxObjectBytes)
	}
	if err != nil {
		return answer(e, err)
	}
	next := make([]byte, room)
	err = c.Update(context.Background(), refOf(ref), func(old []byte) ([]byte, error) {
		n := C.call_edit(edit, user, start(old), C.size_t(len(old)), start(next), room)
		switch {
		case n < 0:
			return nil, errStopped
		case uint64(n) > uint64(room):
			return nil, argument("edit returned %d, and it had room for %d bytes", n, room)
		}
		return next[:n], nil
	})
	return answer(e, err)
}

//export quarry_free
func quarry_free(number C.quarry_client, ref C.quarry_ref, e *C.quarry_error) C.int {
	c, err := clients.get(uint64(number))
	if err == nil {
		err = c.Free(context.Background(), refOf(ref))
	}
	return answer(e, err)
}

//export quarry_free_if
func quarry_free_if(number C.quarry_client, ref C.quarry_ref, version C.uint64_t, e *C.quarry_error) C.int {
	c, err := clients.get(uint64(number))
	if err == nil {
		err = c.CompareAndFree(context.Background(), refOf(ref), uint64(version))
	}
	return answer(e, err)
}

//export quarry_read_many
func quarry_read_many(number C.quarry_client, list *C.quarry_refs, count C.size_t, take C.quarry_take, user unsafe.Pointer, e *C.quarry_error) C.int {
	c, err := clients.get(uint64(number))
	if err == nil && take == nil {
		err = argument("take is NULL")
	}
	if err != nil {
		return answer(e, err)
	}
	refs, err := references(list, count)
	if err != nil {
		return answer(e, err)
	}
	errs := make([]error, count)
	if err := c.ReadMany(context.Background(), refs, taker(take, user, errs)); err != nil {
		return answer(e, err)
	}
	return answer(e, worst(errs))
}

//export quarry_write_many
func quarry_write_many(number C.quarry_client, list *C.quarry_refs, payloads *C.quarry_item, bytes *C.quarry_length, count C.size_t, answers *C.int, e *C.quarry_error) C.int {
	c, err := clients.get(uint64(number))
	if err != nil {
		return answer(e, err)
	}
	refs, err := references(list, count)
	if err != nil {
		return answer(e, err)
	}
	all, err := items("payloads", payloads, bytes, count)
	if err != nil {
		return answer(e, err)
	}
	return answerMany(e, answers, c.WriteMany(context.Background(), refs, all))
}

//export quarry_free_many
func quarry_free_many(number C.quarry_client, list *C.quarry_refs, count C.size_t, answers *C.int, e *C.quarry_error) C.int {
	c, err := clients.get(uint64(number))
	if err != nil {
		return answer(e, err)
	}
	refs, err := references(list, count)
	if err != nil {
		return answer(e, err)
	}
	return answerMany(e, answers, c.FreeMany(context.Background(), refs))
}
