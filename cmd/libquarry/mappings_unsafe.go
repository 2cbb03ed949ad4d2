package main

/*
#include "types.h"
*/
import "C"

import (
	"context"
	"unsafe"

	"github.com/quarrystore/quarry/client/vmm"
)

// mappings are the open handles of mappings. They are of no client: the pager serves them.
var mappings = table[*vmm.Mapping]{kind: 4}

//export quarry_map
func quarry_map(number C.quarry_space, address, bytes C.uint64_t, mode C.uint32_t, memory *unsafe.Pointer, out *C.quarry_mapping, e *C.quarry_error) C.int {
	return answer(e, mapSpace(number, uint64(address), uint64(bytes), mode, memory, out))
}

func mapSpace(number C.quarry_space, address, bytes uint64, mode C.uint32_t, memory *unsafe.Pointer, out *C.quarry_mapping) error {
	s, err := spaces.get(uint64(number))
	if err != nil {
		return err
	}
	if memory == nil || out == nil {
		return argument("memory or mapping is NULL")
	}
	*memory, *out = nil, 0
	modes := map[C.uint32_t]vmm.Mode{C.QUARRY_MAP_RELEASE: vmm.Release, C.QUARRY_MAP_PRIVATE: vmm.Private}
	m, ok := modes[mode]
	if !ok {
		return argument("mode is %d", mode)
	}
	made, err := vmm.Map(context.Background(), s.Space, address, bytes, m, vmm.Options{})
	if err != nil {
		return err
	}
	n, err := mappings.add(made)
	if err != nil {
		_ = made.Close()
		return err
	}
	*memory, *out = start(made.Bytes()), C.quarry_mapping(n)
	return nil
}

// onMapping calls a method of a mapping.
func onMapping(number C.quarry_mapping, e *C.quarry_error, f func(m *vmm.Mapping) error) C.int {
	m, err := mappings.get(uint64(number))
	if err == nil {
		err = f(m)
	}
	return answer(e, err)
}

//export quarry_map_sync
func quarry_map_sync(number C.quarry_mapping, address, bytes C.uint64_t, e *C.quarry_error) C.int {
	return onMapping(number, e, func(m *vmm.Mapping) error { return m.Sync(context.Background(), uint64(address), uint64(bytes)) })
}

//export quarry_map_release
func quarry_map_release(number C.quarry_mapping, address, bytes C.uint64_t, e *C.quarry_error) C.int {
	return onMapping(number, e, func(m *vmm.Mapping) error { return m.Release(context.Background(), uint64(address), uint64(bytes)) })
}

//export quarry_map_acquire
func quarry_map_acquire(number C.quarry_mapping, address, bytes C.uint64_t, e *C.quarry_error) C.int {
	return onMapping(number, e, func(m *vmm.Mapping) error {
		_, err := m.Acquire(context.Background(), uint64(address), uint64(bytes))
		return err
	})
}

//export quarry_map_prefetch
func quarry_map_prefetch(number C.quarry_mapping, address, bytes C.uint64_t, e *C.quarry_error) C.int {
	return onMapping(number, e, func(m *vmm.Mapping) error { return m.Prefetch(context.Background(), uint64(address), uint64(bytes)) })
}

//export quarry_unmap
func quarry_unmap(number C.quarry_mapping, e *C.quarry_error) C.int {
	m, err := mappings.remove(uint64(number))
	if err == nil {
		err = m.Close()
	}
	return answer(e, err)
}
