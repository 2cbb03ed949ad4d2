package sim

import (
	"bytes"
	"encoding/binary"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

const (
	pageBytes = 4096
	pageWords = pageBytes / 8
)

// page is 4 KiB of a region. kept holds, for words whose dirty bit is set, what
// survives a loss of power.
type page struct {
	words [pageWords]uint64      // what verbs see
	kept  [pageWords]uint64      // the word's value before the first unflushed change; meaningful where dirty
	dirty [pageWords / 64]uint64 // a bit a word: changed and not flushed
}

// Profile is what a node's memory does at a loss of power.
type Profile uint8

const (
	// DRAM keeps nothing.
	DRAM Profile = iota
	// ADRDDIOOn: WRITEs stay in the CPU's cache until flushed.
	ADRDDIOOn
	// ADRDDIOOff: a READ over the connection pushes its earlier WRITEs to the memory.
	ADRDDIOOff
	// EADR: what is visible is persistent.
	EADR
)

func (p Profile) String() string {
	return [...]string{"DRAM", "ADR, DDIO on", "ADR, DDIO off", "eADR"}[p]
}

var zeros [pageBytes]byte

// Memory is one node's copy of a region.
type Memory struct {
	Node    *Node            // that holds it
	Region  uint32           // number in the table
	Profile Profile          // what a loss of power leaves; constant
	Method  rdma.FlushMethod // of persistent FLUSHes
	Domain  proto.Domain     // a CAS from a connection of another domain is not atomic
	Epoch   uint64           // under which it is open, or was closed
	key     uint64           // 0 is closed; windows' keys are made of it, see keyOf
	adapter int              // of the node, that it was opened at last
	shared  bool             // it was opened at an adapter while it was open at another one

	bytes   uint64  // size of the region; a multiple of pageBytes
	pages   []*page // nil: never written, all zeros
	touched []int32 // indices of the pages that are not nil
	free    []*page // pages that Zero gave back
}

// Bytes is the size of the region.
func (m *Memory) Bytes() uint64 { return m.bytes }

// Zero makes every word 0, persistently.
func (m *Memory) Zero() {
	for _, i := range m.touched {
		p := m.pages[i]
		p.words, p.dirty = [pageWords]uint64{}, [pageWords / 64]uint64{} // kept counts where dirty
		m.free = append(m.free, p)
		m.pages[i] = nil
	}
	m.touched = m.touched[:0]
}

// page is the page with an offset, made when it is first touched.
func (m *Memory) page(off uint64) *page {
	i := off / pageBytes
	p := m.pages[i]
	if p == nil {
		if n := len(m.free); n > 0 {
			p, m.free = m.free[n-1], m.free[:n-1]
		} else {
			p = &page{}
		}
		m.pages[i] = p
		m.touched = append(m.touched, int32(i))
	}
	return p
}

// Word is the word at a byte offset.
func (m *Memory) Word(off uint64) uint64 {
	p := m.pages[off/pageBytes]
	if p == nil {
		return 0
	}
	return p.words[off%pageBytes/8]
}

// Set stores a word; it is not persistent until flushed.
func (m *Memory) Set(off, w uint64) {
	p := m.page(off)
	i := off % pageBytes / 8
	if m.Profile == ADRDDIOOn || m.Profile == ADRDDIOOff {
		if bit := uint64(1) << (i % 64); p.dirty[i/64]&bit == 0 {
			p.dirty[i/64] |= bit
			p.kept[i] = p.words[i]
		}
	}
	p.words[i] = w
}

// Used says whether the page at a byte offset has ever been written.
func (m *Memory) Used(off uint64) bool { return m.pages[off/pageBytes] != nil }

// loadAlternate loads every other word of b: those whose number in the memory is even (0) or odd (1).
// off and the length of b are multiples of 8.
func (m *Memory) loadAlternate(off uint64, b []byte, parity uint64) {
	for len(b) > 0 {
		in := off % pageBytes / 8
		n := min(uint64(len(b))/8, pageWords-in)
		first := in%2 ^ parity
		if p := m.pages[off/pageBytes]; p != nil {
			words := p.words[in : in+n]
			for i := first; i < n; i += 2 {
				binary.LittleEndian.PutUint64(b[8*i:], words[i])
			}
		} else {
			for i := first; i < n; i += 2 {
				binary.LittleEndian.PutUint64(b[8*i:], 0)
			}
		}
		b, off = b[8*n:], off+8*n
	}
}

// Load copies bytes out.
func (m *Memory) Load(off uint64, b []byte) {
	for len(b) > 0 {
		in := off % pageBytes
		n := min(uint64(len(b)), pageBytes-in)
		p := m.pages[off/pageBytes]
		switch {
		case p == nil:
			clear(b[:n])
		case in%8 == 0 && n%8 == 0:
			to := b[:n]
			for _, w := range p.words[in/8 : (in+n)/8] {
				binary.LittleEndian.PutUint64(to, w)
				to = to[8:]
			}
		default:
			for i := range n {
				b[i] = byte(p.words[(in+i)/8] >> (8 * ((in + i) % 8)))
			}
		}
		b, off = b[n:], off+n
	}
}

// Store copies bytes in.
func (m *Memory) Store(off uint64, b []byte) {
	for len(b) > 0 {
		if off%pageBytes == 0 && len(b) >= pageBytes && m.pages[off/pageBytes] == nil && bytes.Equal(b[:pageBytes], zeros[:]) {
			b, off = b[pageBytes:], off+pageBytes // zeros, as they are
			continue
		}
		if off%8 == 0 && len(b) >= 8 {
			m.Set(off, binary.LittleEndian.Uint64(b))
			b, off = b[8:], off+8
			continue
		}
		sh := 8 * (off % 8)
		m.Set(off&^7, m.Word(off&^7)&^(0xff<<sh)|uint64(b[0])<<sh)
		b, off = b[1:], off+1
	}
}

// Clean says whether a range holds nothing but zeros.
func (m *Memory) Clean(off, n uint64) bool {
	for a := off; a < off+n; a += pageBytes {
		if p := m.pages[a/pageBytes]; p != nil && p.words != [pageWords]uint64{} {
			return false
		}
	}
	return true
}

// Copy stores n bytes that lie at another offset, a line in a wrong place.
func (m *Memory) Copy(to, from, n uint64) {
	for i := uint64(0); i < n; i += 8 {
		m.Set(to+i, m.Word(from+i))
	}
}

// Flush makes a range persistent.
func (m *Memory) Flush(off, n uint64) {
	for a := off &^ 7; a < off+n; a += 8 {
		p := m.pages[a/pageBytes]
		if p == nil {
			a |= pageBytes - 8 // to the next page
			continue
		}
		i := a % pageBytes / 8
		p.dirty[i/64] &^= 1 << (i % 64)
	}
}

// flush carries a FLUSH out. With DDIO on, a READ leaves what is in the caches there.
func (m *Memory) flush(kind rdma.FlushKind, off, n uint64) {
	if kind == rdma.Persistent && (m.Method != rdma.ReadAfterWrite || m.Profile != ADRDDIOOn) {
		m.Flush(off, n)
	}
}

// Dirty says whether a word of the range would not survive a loss of power for sure.
func (m *Memory) Dirty(off, n uint64) bool {
	for a := off &^ 7; a < off+n; a += 8 {
		if p := m.pages[a/pageBytes]; p != nil {
			if i := a % pageBytes / 8; p.dirty[i/64]>>(i%64)&1 != 0 {
				return true
			}
		}
	}
	return false
}

// PowerLoss keeps of each unflushed word the old or the new value, by choice.
func (m *Memory) PowerLoss(choose func(n int) int) {
	if m.Profile == DRAM {
		m.Zero()
		return
	}
	for _, pi := range m.touched {
		p := m.pages[pi]
		for d := range p.dirty {
			for b := 0; p.dirty[d] != 0; b++ {
				bit := uint64(1) << b
				if p.dirty[d]&bit == 0 {
					continue
				}
				p.dirty[d] &^= bit
				if i := 64*d + b; choose(2) == 0 {
					p.words[i] = p.kept[i]
				}
			}
		}
	}
}

// FlipBit damages a bit, as rot does.
func (m *Memory) FlipBit(off uint64, bit uint) { m.Set(off, m.Word(off)^1<<bit) }
