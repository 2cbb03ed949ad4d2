package pmem

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
)

// Ledger is persistent memory of granularity line in software, for tests. live is what processors see; a store
// is durable when a write-back that began after it, of its line, has been fenced. Cut is a loss of power.
//
// A write-back takes the line's content of that moment, as the weakest hardware may: a store after it
// needs another. A fence completes the write-backs of all goroutines. If several flush at a time, one goroutine's fence can
// hide that another's is missing.
type Ledger struct {
	// Before is called ahead of each write-back and each fence, the moments between which losses of power differ; nil: not.
	Before func()

	live []byte

	mu      sync.Mutex
	shared  *shared // with other processes; nil: with none
	durable []byte
	begun   map[uint64]begun // write-backs of this process without a fence, by the line's offset

	flushed, needless uint64 // lines written back by this process, and those of them that were durable already
	steps             uint64 // write-backs and fences of this process
}

// begun is a write-back without a fence.
type begun struct {
	line [lineBytes]byte
	turn uint64 // its place among the write-backs of all processes; 0 in a ledger of one process
}

// NewLedger makes a ledger over memory, all of which counts as durable.
// Preconditions: len(live) is a multiple of a line; processors change nothing meanwhile.
func NewLedger(live []byte) *Ledger {
	if len(live)%lineBytes != 0 {
		panic(fmt.Sprintf("ledger over %d bytes: want whole lines of %d", len(live), lineBytes))
	}
	return &Ledger{live: live, durable: append([]byte(nil), live...), begun: map[uint64]begun{}}
}

// Flusher of the ledger's memory.
func (l *Ledger) Flusher() Flusher {
	return Flusher{way: CLWB, unit: &unit{writeBack: l.writeBack, stream: l.stream, fence: l.fence}}
}

// writeBack begins the write-back of all lines that [off, off+n) touches. Nothing is durable
// before fence.
func (l *Ledger) writeBack(mem []byte, off, n uint64) {
	l.step()
	l.lock()
	defer l.unlock()
	l.steps++
	for at := off &^ (lineBytes - 1); at < off+n; at += lineBytes {
		b := begun{turn: l.shared.next()}
		words(b.line[:], mem[at:at+lineBytes])
		l.begun[at] = b
		l.flushed++
		if b.line == [lineBytes]byte(l.durable[at:]) {
			l.needless++
		}
	}
}

// stream is a store past the cache: a store and its write-back in one.
func (l *Ledger) stream(mem []byte, off uint64, src []byte) {
	words(mem[off:off+uint64(len(src))], src)
	l.writeBack(mem, off, uint64(len(src)))
}

func (l *Ledger) step() {
	if l.Before != nil {
		l.Before()
	}
}

// fence makes durable what write-backs of this process have begun, except lines of which another
// process has completed a later one.
func (l *Ledger) fence() {
	l.step()
	l.lock()
	defer l.unlock()
	l.steps++
	for at, b := range l.begun {
		if l.shared.newest(at, b.turn) {
			words(l.durable[at:at+lineBytes], b.line[:])
			l.shared.done(at, b.turn)
		}
		delete(l.begun, at)
	}
}

func (l *Ledger) lock() {
	l.mu.Lock()
	l.shared.lock()
}

func (l *Ledger) unlock() {
	l.shared.unlock()
	l.mu.Unlock()
}

// Steps counts the write-backs of ranges, and the fences, of this process.
func (l *Ledger) Steps() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.steps
}

// Cut is the memory after a loss of power at this moment. Of the words of 8 bytes that are not
// durable each has its new content if survives says so. Half is one such coin; None and All are others.
func (l *Ledger) Cut(survives func() bool) []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	image, _ := l.cut(survives)
	return image
}

// cut is Cut; lost is how many lines have lost a word. Preconditions: mu is held.
func (l *Ledger) cut(survives func() bool) (image []byte, lost int) {
	image = append([]byte(nil), l.durable...)
	last := -1 // line that has lost a word
	for at := 0; at < len(image); at += 8 {
		var now [8]byte
		words(now[:], l.live[at:at+8])
		switch {
		case now == [8]byte(image[at:]):
		case survives():
			copy(image[at:], now[:])
		case at/lineBytes != last:
			last = at / lineBytes
			lost++
		}
	}
	return image, lost
}

// restart gives the memory the content that a loss of power has left; write-backs without a fence are gone.
// Preconditions: nothing stores to it.
func (l *Ledger) restart(image []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for at := 0; at < len(image); at += lineBytes { // most are as before, and files have holes
		line := [lineBytes]byte(image[at:])
		for _, mem := range [][]byte{l.live, l.durable} {
			if [lineBytes]byte(mem[at:]) != line {
				copy(mem[at:], line[:])
			}
		}
	}
	clear(l.begun)
}

// None survives: only what is durable.
func None() bool { return false }

// All survives, as if every cache had been written back in time.
func All() bool { return true }

// Half is a seeded coin for each word.
func Half(seed uint64) func() bool {
	r := rand.New(rand.NewPCG(seed, seed))
	return func() bool { return r.Uint64()&1 != 0 }
}

// Lines is how many lines were written back so far, and how many of these were durable already.
func (l *Ledger) Lines() (flushed, needless uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.flushed, l.needless
}

// words copies word by word. Preconditions: the lengths are equal, a multiple of 8.
func words(to, from []byte) {
	for i := 0; i < len(from); i += 8 {
		binary.NativeEndian.PutUint64(to[i:], binary.NativeEndian.Uint64(from[i:]))
	}
}
