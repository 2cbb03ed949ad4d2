package main

import (
	"errors"
	"sync"
	"sync/atomic"
)

// maxHandles bounds the open handles of one kind in a process.
const maxHandles = 4096

var (
	errHandle  = errors.New("the handle is closed, or is not one of this kind")
	errHandles = errors.New("too many open handles: close those that are not used")
)

// A table gives numbers to values, which C keeps in their place. get takes no lock and allocates nothing.
//
// A number is kind<<56 | serial<<12 | slot: a number that is closed, made up or of another kind has no
// entry with the same number.
type table[T any] struct {
	kind   uint64
	mu     sync.Mutex // guards serial, and who stores into slots
	serial uint64
	slots  [maxHandles]atomic.Pointer[handle[T]]
}

type handle[T any] struct {
	number uint64
	value  T
}

// add gives a number to a value; errHandles if all are taken.
func (t *table[T]) add(value T) (number uint64, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for range maxHandles {
		t.serial++
		slot := t.serial % maxHandles
		if t.slots[slot].Load() == nil {
			number = t.kind<<56 | t.serial<<12&(1<<56-1) | slot
			t.slots[slot].Store(&handle[T]{number, value})
			return number, nil
		}
	}
	return 0, errHandles
}

// get is the value of a number; errHandle if it has none.
func (t *table[T]) get(number uint64) (value T, err error) {
	h := t.slots[number%maxHandles].Load()
	if h == nil || h.number != number {
		return value, errHandle
	}
	return h.value, nil
}

// remove takes a number away and returns its value, to one caller alone.
func (t *table[T]) remove(number uint64) (value T, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if value, err = t.get(number); err == nil {
		t.slots[number%maxHandles].Store(nil)
	}
	return value, err
}

// removeIf takes away the numbers of all values for which f holds.
func (t *table[T]) removeIf(f func(T) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.slots {
		if h := t.slots[i].Load(); h != nil && f(h.value) {
			t.slots[i].Store(nil)
		}
	}
}
