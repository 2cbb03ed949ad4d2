package main

/*
#include "types.h"
*/
import "C"

import (
	"context"
	"fmt"
	"unsafe"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
)

// A spaceHandle is what a handle stands for.
type spaceHandle struct {
	*space.Space
	of uint64 // the client's handle
}

// spaces are the open handles of spaces.
var spaces = table[spaceHandle]{kind: 3}

//export quarry_space_create
func quarry_space_create(number C.quarry_client, name *C.quarry_text, bytes C.uint64_t, replicas C.uint32_t, out *C.quarry_space, e *C.quarry_error) C.int {
	return answer(e, openSpace(number, name, out, func(c *client.Client, name string) (*space.Space, error) {
		if replicas > 3 {
			return nil, argument("replicas is %d", replicas)
		}
		return space.Create(context.Background(), c, name, uint64(bytes), space.Options{Replicas: int(replicas)})
	}))
}

//export quarry_space_open
func quarry_space_open(number C.quarry_client, name *C.quarry_text, out *C.quarry_space, e *C.quarry_error) C.int {
	return answer(e, openSpace(number, name, out, func(c *client.Client, name string) (*space.Space, error) {
		return space.Open(context.Background(), c, name)
	}))
}

func openSpace(number C.quarry_client, name *C.quarry_text, out *C.quarry_space, open func(*client.Client, string) (*space.Space, error)) error {
	c, err := clients.get(uint64(number))
	if err != nil {
		return err
	}
	if out == nil {
		return argument("space is NULL")
	}
	*out = 0
	s, err := text("name", name)
	if err != nil {
		return err
	}
	opened, err := open(c, s)
	if err != nil {
		return err
	}
	n, err := spaces.add(spaceHandle{opened, uint64(number)})
	*out = C.quarry_space(n)
	return err
}

//export quarry_space_close
func quarry_space_close(number C.quarry_space, e *C.quarry_error) C.int {
	_, err := spaces.remove(uint64(number))
	return answer(e, err)
}

//export quarry_space_delete
func quarry_space_delete(number C.quarry_client, name *C.quarry_text, e *C.quarry_error) C.int {
	c, err := clients.get(uint64(number))
	if err != nil {
		return answer(e, err)
	}
	s, err := text("name", name)
	if err == nil {
		err = space.Delete(context.Background(), c, s)
	}
	return answer(e, err)
}

//export quarry_space_grow
func quarry_space_grow(number C.quarry_space, bytes C.uint64_t, e *C.quarry_error) C.int {
	s, err := spaces.get(uint64(number))
	if err == nil {
		err = s.Grow(context.Background(), uint64(bytes))
	}
	return answer(e, err)
}

//export quarry_space_stat
func quarry_space_stat(number C.quarry_space, out *C.quarry_space_info, e *C.quarry_error) C.int {
	s, err := spaces.get(uint64(number))
	switch {
	case err != nil:
	case out == nil:
		err = argument("info is NULL")
	default:
		i := s.Info()
		*out = C.quarry_space_info{base: C.uint64_t(i.Base), bytes: C.uint64_t(i.Bytes), region_bytes: C.uint64_t(i.RegionBytes), replicas: C.uint32_t(i.Replicas)}
		if i.Durable {
			out.durable = 1
		}
	}
	return answer(e, err)
}

// ranged are the space of a handle and the bytes of the caller's that a call moves.
func ranged(number C.quarry_space, name string, p unsafe.Pointer, n C.size_t) (spaceHandle, []byte, error) {
	s, err := spaces.get(uint64(number))
	if err != nil {
		return s, nil, err
	}
	b, err := memory(name, p, n)
	return s, b, err
}

//export quarry_space_read
func quarry_space_read(number C.quarry_space, address C.uint64_t, buffer unsafe.Pointer, n C.size_t, e *C.quarry_error) C.int {
	s, b, err := ranged(number, "buffer", buffer, n)
	if err == nil {
		_, err = s.Read(context.Background(), b, uint64(address))
	}
	return answer(e, err)
}

//export quarry_space_write
func quarry_space_write(number C.quarry_space, address C.uint64_t, data C.quarry_bytes, n C.size_t, e *C.quarry_error) C.int {
	s, b, err := ranged(number, "data", unsafe.Pointer(data), n)
	if err == nil {
		done := 0
		if done, err = s.Write(context.Background(), b, uint64(address)); err != nil && done > 0 {
			err = fmt.Errorf("%w: %d bytes are written: %w", client.ErrUnknown, done, err)
		}
	}
	return answer(e, err)
}

//export quarry_space_load64
func quarry_space_load64(number C.quarry_space, address C.uint64_t, value *C.uint64_t, e *C.quarry_error) C.int {
	s, err := spaces.get(uint64(number))
	if err == nil && value == nil {
		err = argument("value is NULL")
	}
	if err == nil {
		var v uint64
		v, err = s.Load64(context.Background(), uint64(address))
		*value = C.uint64_t(v)
	}
	return answer(e, err)
}

//export quarry_space_store64
func quarry_space_store64(number C.quarry_space, address, value C.uint64_t, e *C.quarry_error) C.int {
	s, err := spaces.get(uint64(number))
	if err == nil {
		err = s.Store64(context.Background(), uint64(address), uint64(value))
	}
	return answer(e, err)
}

//export quarry_space_cas64
func quarry_space_cas64(number C.quarry_space, address, expect, value C.uint64_t, old *C.uint64_t, e *C.quarry_error) C.int {
	s, err := spaces.get(uint64(number))
	if err != nil {
		return answer(e, err)
	}
	was, swapped, err := s.CAS64(context.Background(), uint64(address), uint64(expect), uint64(value))
	if err == nil && !swapped {
		err = fmt.Errorf("%w: the word at %#x is %d", client.ErrConflict, uint64(address), was)
	}
	if old != nil {
		*old = C.uint64_t(was)
	}
	return answer(e, err)
}

//export quarry_space_add64
func quarry_space_add64(number C.quarry_space, address, addend C.uint64_t, old *C.uint64_t, e *C.quarry_error) C.int {
	s, err := spaces.get(uint64(number))
	if err == nil {
		var was uint64
		was, err = s.Add64(context.Background(), uint64(address), uint64(addend))
		if old != nil {
			*old = C.uint64_t(was)
		}
	}
	return answer(e, err)
}
