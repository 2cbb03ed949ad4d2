package main

/*
#include "bridge.h"
*/
import "C"

import (
	"unsafe"

	"github.com/quarrystore/quarry/client/pool"
)

// The attributes of C and of package pool lie in memory alike: an index that is not 0 does not compile.
var _ = [...]struct{}{
	[1]struct{}{}[unsafe.Sizeof(pool.Attr{})-C.sizeof_struct_rpmem_pool_attr],
	[1]struct{}{}[unsafe.Offsetof(pool.Attr{}.PoolsetUUID)-unsafe.Offsetof(C.struct_rpmem_pool_attr{}.poolset_uuid)],
	[1]struct{}{}[unsafe.Offsetof(pool.Attr{}.UserFlags)-unsafe.Offsetof(C.struct_rpmem_pool_attr{}.user_flags)],
	[1]struct{}{}[C.RPMEM_HEADER-headerBytes],
}

// answer is the errno of an error, whose text is stored for rpmem_errormsg.
func answer(err error, text *C.char, room C.size_t) C.int {
	if err == nil {
		return 0
	}
	to := unsafe.Slice((*byte)(unsafe.Pointer(text)), room)
	to[copy(to[:room-1], err.Error())] = 0
	return C.int(errnoOf(err))
}

// attrAt is the attributes of C.
func attrAt(a *C.struct_rpmem_pool_attr) *pool.Attr { return (*pool.Attr)(unsafe.Pointer(a)) }

//export quarry_rpmem_get
func quarry_rpmem_get(target, name *C.char, addr unsafe.Pointer, size C.size_t, lanes *C.uint, attr *C.struct_rpmem_pool_attr, create C.int, number *C.uint64_t, text *C.char, room C.size_t) C.int {
	var a pool.Attr
	if attr != nil && create != 0 {
		a = *attrAt(attr)
	}
	o, err := get(C.GoString(target), C.GoString(name), unsafe.Slice((*byte)(addr), size), uint(*lanes), create != 0, a)
	if err != nil {
		return answer(err, text, room)
	}
	*lanes = C.uint(o.lanes)
	if attr != nil && create == 0 {
		*attrAt(attr) = o.Attr()
	}
	*number = C.uint64_t(add(o))
	return 0
}

//export quarry_rpmem_set_attr
func quarry_rpmem_set_attr(number C.uint64_t, attr *C.struct_rpmem_pool_attr, text *C.char, room C.size_t) C.int {
	o, err := find(uint64(number))
	if err == nil {
		err = o.SetAttr(*attrAt(attr))
	}
	return answer(err, text, room)
}

//export quarry_rpmem_close
func quarry_rpmem_close(number C.uint64_t, text *C.char, room C.size_t) C.int {
	o, err := take(uint64(number))
	if err == nil {
		err = o.close()
	}
	return answer(err, text, room)
}

//export quarry_rpmem_persist
func quarry_rpmem_persist(number C.uint64_t, off, n C.size_t, lane C.uint, deep C.int, text *C.char, room C.size_t) C.int {
	o, err := find(uint64(number))
	if err == nil {
		err = o.persist(uint64(off), uint64(n), uint(lane), deep != 0)
	}
	return answer(err, text, room)
}

//export quarry_rpmem_read
func quarry_rpmem_read(number C.uint64_t, to unsafe.Pointer, off, n C.size_t, lane C.uint, text *C.char, room C.size_t) C.int {
	o, err := find(uint64(number))
	switch {
	case err != nil:
	case uint(lane) >= o.lanes:
		err = o.persist(headerBytes, 0, uint(lane), false) // says so
	case uint64(n) > o.Bytes():
		err = pool.ErrRange // before a slice is made of the caller's number
	case n > 0:
		err = o.Read(unsafe.Slice((*byte)(to), n), uint64(off))
	}
	return answer(err, text, room)
}

//export quarry_rpmem_remove
func quarry_rpmem_remove(target, name *C.char, text *C.char, room C.size_t) C.int {
	return answer(removePool(C.GoString(target), C.GoString(name)), text, room)
}
