package main

/*
#include <stdlib.h>
#include "types.h"
*/
import "C"

import (
	"context"
	"unsafe"

	"github.com/quarrystore/quarry/client"
)

// named are the client of a handle and a name that a call is for.
func named(number C.quarry_client, name *C.quarry_text) (*client.Names, string, error) {
	c, err := clients.get(uint64(number))
	if err != nil {
		return nil, "", err
	}
	s, err := text("name", name)
	return c.Names(), s, err
}

//export quarry_name_create
func quarry_name_create(number C.quarry_client, name, kind *C.quarry_text, ref C.quarry_ref, revision *C.uint64_t, e *C.quarry_error) C.int {
	names, s, err := named(number, name)
	if err != nil {
		return answer(e, err)
	}
	k, err := text("kind", kind)
	if err != nil {
		return answer(e, err)
	}
	entry, err := names.Create(context.Background(), s, k, refOf(ref))
	if err == nil && revision != nil {
		*revision = C.uint64_t(entry.Revision)
	}
	return answer(e, err)
}

//export quarry_name_lookup
func quarry_name_lookup(number C.quarry_client, name *C.quarry_text, ref *C.quarry_ref, revision *C.uint64_t, e *C.quarry_error) C.int {
	names, s, err := named(number, name)
	if err != nil {
		return answer(e, err)
	}
	entry, err := names.Lookup(context.Background(), s)
	if err == nil && ref != nil {
		*ref = toRef(entry.Ref)
	}
	if err == nil && revision != nil {
		*revision = C.uint64_t(entry.Revision)
	}
	return answer(e, err)
}

//export quarry_name_swap
func quarry_name_swap(number C.quarry_client, name *C.quarry_text, ref C.quarry_ref, revision *C.uint64_t, e *C.quarry_error) C.int {
	names, s, err := named(number, name)
	if err == nil && revision == nil {
		err = argument("revision is NULL")
	}
	if err != nil {
		return answer(e, err)
	}
	entry, err := names.Swap(context.Background(), s, uint64(*revision), refOf(ref))
	if err == nil {
		*revision = C.uint64_t(entry.Revision)
	}
	return answer(e, err)
}

//export quarry_name_delete
func quarry_name_delete(number C.quarry_client, name *C.quarry_text, revision C.uint64_t, e *C.quarry_error) C.int {
	names, s, err := named(number, name)
	if err == nil {
		err = names.Delete(context.Background(), s, uint64(revision))
	}
	return answer(e, err)
}

//export quarry_name_list
func quarry_name_list(number C.quarry_client, prefix, kind *C.quarry_text, each C.quarry_name_each, user unsafe.Pointer, e *C.quarry_error) C.int {
	names, p, err := named(number, prefix)
	if err == nil && each == nil {
		err = argument("each is NULL")
	}
	if err != nil {
		return answer(e, err)
	}
	k, err := text("kind", kind)
	if err != nil {
		return answer(e, err)
	}
	err = names.List(context.Background(), p, k, func(entry client.Name) error {
		name, kind := C.CString(entry.Name), C.CString(entry.Kind)
		defer C.free(unsafe.Pointer(name))
		defer C.free(unsafe.Pointer(kind))
		if C.call_name(each, user, name, kind, toRef(entry.Ref), C.uint64_t(entry.Revision)) != 0 {
			return errStopped
		}
		return nil
	})
	return answer(e, err)
}
