package host

import (
	"bytes"
	"fmt"
)

// Pin is called before a device registers the pages of the memory: until Unpin they stay
// the memory's own. It refuses memory that no device may write to.
func (m *Memory) Pin() error {
	if m.unpinnable != nil {
		return m.unpinnable
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pins++
	return nil
}

// Unpin takes one Pin back, after the device has deregistered the pages.
func (m *Memory) Unpin() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.pins == 0 {
		panic(fmt.Sprintf("memory of %s: unpinned more often than pinned", m.name))
	}
	m.pins--
}

// Zero zeroes the memory from an offset to its end; persistent memory is flushed. It
// writes zeros in place and never makes a hole: a hole gives up the reservation of its
// blocks or pages, so that a later touch can find none free and end the process, and a
// device keeps the pages that it has registered, so that it and the processors would see
// different memory. Pages that are zero already are only read.
//
// Preconditions: from is a multiple of 8; nothing else uses the memory.
func (m *Memory) Zero(from uint64) error {
	if from > uint64(len(m.mem)) {
		return fmt.Errorf("memory of %s: zeroing from %d is outside of its %d bytes", m.name, from, len(m.mem))
	}
	for off := from; off < uint64(len(m.mem)); {
		end := min(off&^(uint64(len(zeros))-1)+uint64(len(zeros)), uint64(len(m.mem)))
		if b := m.mem[off:end]; !bytes.Equal(b, zeros[:len(b)]) {
			clear(b)
		}
		off = end
	}
	if !m.flush.Persistent() {
		return nil
	}
	return m.Persist(from, uint64(len(m.mem))-from)
}

var zeros [4096]byte
