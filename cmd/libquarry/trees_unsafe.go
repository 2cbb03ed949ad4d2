package main

/*
#include "types.h"
*/
import "C"

import (
	"context"
	"unsafe"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
)

// A tree is what a handle stands for.
type tree struct {
	*kv.Tree
	of uint64 // the client's handle
}

// trees are the open handles of trees.
var trees = table[tree]{kind: 2}

//export quarry_tree_open
func quarry_tree_open(number C.quarry_client, name *C.quarry_text, flags C.uint32_t, out *C.quarry_tree, e *C.quarry_error) C.int {
	return answer(e, openTree(number, name, flags, out))
}

func openTree(number C.quarry_client, name *C.quarry_text, flags C.uint32_t, out *C.quarry_tree) error {
	c, err := clients.get(uint64(number))
	if err != nil {
		return err
	}
	if out == nil {
		return argument("tree is NULL")
	}
	*out = 0
	s, err := text("name", name)
	if err != nil {
		return err
	}
	open := kv.Open
	switch flags {
	case 0:
	case C.QUARRY_TREE_CREATE:
		open = kv.OpenOrCreate
	case C.QUARRY_TREE_NEW:
		open = kv.Create
	default:
		return argument("flags are %d", flags)
	}
	t, err := open(context.Background(), c, s, btree.Config{ReadOnly: c.ReadOnly()})
	if err != nil {
		return err
	}
	n, err := trees.add(tree{t, uint64(number)})
	*out = C.quarry_tree(n)
	return err
}

//export quarry_tree_close
func quarry_tree_close(number C.quarry_tree, e *C.quarry_error) C.int {
	_, err := trees.remove(uint64(number))
	return answer(e, err)
}

//export quarry_tree_drop
func quarry_tree_drop(number C.quarry_tree, e *C.quarry_error) C.int {
	t, err := trees.get(uint64(number))
	if err == nil {
		if err = t.Drop(context.Background()); err == nil {
			_, _ = trees.remove(uint64(number)) // another thread may have closed it
		}
	}
	return answer(e, err)
}

// keyed are the tree of a handle and the key that a call is for.
func keyed(number C.quarry_tree, key C.quarry_bytes, n C.size_t) (tree, []byte, error) {
	t, err := trees.get(uint64(number))
	if err != nil {
		return t, nil, err
	}
	k, err := memory("key", unsafe.Pointer(key), n)
	return t, k, err
}

//export quarry_get
func quarry_get(number C.quarry_tree, key C.quarry_bytes, keyBytes C.size_t, buffer unsafe.Pointer, room C.size_t, n *C.size_t, version *C.uint64_t, e *C.quarry_error) C.int {
	t, k, err := keyed(number, key, keyBytes)
	if err != nil {
		return answer(e, err)
	}
	b, err := memory("buffer", buffer, min(room, C.QUARRY_MAX_OBJECT_BYTES))
	if err != nil {
		return answer(e, err)
	}
	var got []byte
	if version == nil {
		got, err = t.Get(context.Background(), k, b[:0])
	} else {
		var v uint64
		got, v, err = t.GetVersion(context.Background(), k, b[:0])
		*version = C.uint64_t(v)
	}
	if err == nil {
		err = deliver(b, got, n)
	}
	return answer(e, err)
}

// entry are the tree, key and value of a put.
func entry(number C.quarry_tree, key C.quarry_bytes, keyBytes C.size_t, value C.quarry_bytes, bytes C.size_t) (t tree, k, v []byte, err error) {
	if t, k, err = keyed(number, key, keyBytes); err == nil {
		v, err = memory("value", unsafe.Pointer(value), bytes)
	}
	return t, k, v, err
}

//export quarry_put
func quarry_put(number C.quarry_tree, key C.quarry_bytes, keyBytes C.size_t, value C.quarry_bytes, bytes C.size_t, e *C.quarry_error) C.int {
	t, k, v, err := entry(number, key, keyBytes, value, bytes)
	if err == nil {
		err = t.Put(context.Background(), k, v)
	}
	return answer(e, err)
}

//export quarry_put_new
func quarry_put_new(number C.quarry_tree, key C.quarry_bytes, keyBytes C.size_t, value C.quarry_bytes, bytes C.size_t, version *C.uint64_t, e *C.quarry_error) C.int {
	t, k, v, err := entry(number, key, keyBytes, value, bytes)
	if err != nil {
		return answer(e, err)
	}
	made, err := t.PutIf(context.Background(), k, v, btree.IfAbsent())
	if err == nil && version != nil {
		*version = C.uint64_t(made)
	}
	return answer(e, err)
}

//export quarry_put_if
func quarry_put_if(number C.quarry_tree, key C.quarry_bytes, keyBytes C.size_t, value C.quarry_bytes, bytes C.size_t, version *C.uint64_t, e *C.quarry_error) C.int {
	t, k, v, err := entry(number, key, keyBytes, value, bytes)
	if err == nil && version == nil {
		err = argument("version is NULL")
	}
	if err != nil {
		return answer(e, err)
	}
	made, err := t.PutIf(context.Background(), k, v, btree.IfVersion(uint64(*version)))
	if err == nil {
		*version = C.uint64_t(made)
	}
	return answer(e, err)
}

//export quarry_delete
func quarry_delete(number C.quarry_tree, key C.quarry_bytes, keyBytes C.size_t, e *C.quarry_error) C.int {
	t, k, err := keyed(number, key, keyBytes)
	if err == nil {
		err = t.Delete(context.Background(), k)
	}
	return answer(e, err)
}

//export quarry_delete_if
func quarry_delete_if(number C.quarry_tree, key C.quarry_bytes, keyBytes C.size_t, version C.uint64_t, e *C.quarry_error) C.int {
	t, k, err := keyed(number, key, keyBytes)
	if err == nil {
		err = t.DeleteIf(context.Background(), k, btree.IfVersion(uint64(version)))
	}
	return answer(e, err)
}

//export quarry_get_many
func quarry_get_many(number C.quarry_tree, keys *C.quarry_item, keyBytes *C.quarry_length, count C.size_t, take C.quarry_take, user unsafe.Pointer, e *C.quarry_error) C.int {
	t, err := trees.get(uint64(number))
	if err == nil && take == nil {
		err = argument("take is NULL")
	}
	if err != nil {
		return answer(e, err)
	}
	all, err := items("keys", keys, keyBytes, count)
	if err != nil {
		return answer(e, err)
	}
	errs := make([]error, count)
	give := taker(take, user, errs)
	if err := t.GetMany(context.Background(), all, func(i int, value []byte, _ uint64, err error) { give(i, value, err) }); err != nil {
		return answer(e, err)
	}
	return answer(e, worst(errs))
}

//export quarry_put_many
func quarry_put_many(number C.quarry_tree, keys *C.quarry_item, keyBytes *C.quarry_length, values *C.quarry_item, bytes *C.quarry_length, count C.size_t, answers *C.int, e *C.quarry_error) C.int {
	t, err := trees.get(uint64(number))
	if err != nil {
		return answer(e, err)
	}
	k, err := items("keys", keys, keyBytes, count)
	if err != nil {
		return answer(e, err)
	}
	v, err := items("values", values, bytes, count)
	if err != nil {
		return answer(e, err)
	}
	return answerMany(e, answers, t.PutMany(context.Background(), k, v))
}

//export quarry_scan
func quarry_scan(number C.quarry_tree, from C.quarry_bytes, fromBytes C.size_t, to C.quarry_bytes, toBytes C.size_t, limit C.uint64_t, reverse C.int, each C.quarry_entry, user unsafe.Pointer, e *C.quarry_error) C.int {
	t, first, err := keyed(number, from, fromBytes)
	if err != nil {
		return answer(e, err)
	}
	r := btree.Range{From: first, Reverse: reverse != 0}
	if to != nil {
		if r.To, err = memory("to", unsafe.Pointer(to), toBytes); err != nil {
			return answer(e, err)
		}
	}
	switch {
	case each == nil:
		return answer(e, argument("each is NULL"))
	case reverse != 0 && reverse != 1, limit > maxLimit:
		return answer(e, argument("reverse is %d (0 or 1), limit is %d (at most %d)", reverse, limit, maxLimit))
	}
	r.Limit = int(limit)
	stopped := false
	err = t.Scan(context.Background(), r, func(key, value []byte, version uint64) bool {
		stopped = C.call_entry(each, user, start(key), C.size_t(len(key)), start(value), C.size_t(len(value)), C.uint64_t(version)) != 0
		return !stopped
	})
	if err == nil && stopped {
		err = errStopped
	}
	return answer(e, err)
}

// maxLimit of a scan.
const maxLimit = 1 << 31
