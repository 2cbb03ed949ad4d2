package cxl

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
)

// This file asks two hosts whether the memory that both map is one memory to their processors. Each runs a side of the
// programs below at the same time:
//
//	add          increments by FETCH_ADD: none is lost
//	cas          increments by CAS: none is lost
//	store-load   both store a word of their own and load the other's: one of them sees the other's store, which is what a gate relies on
//	write-flag   a host that sees a flag sees the bytes that were written before it
//	word         8 aligned bytes are never seen torn
//
// The programs themselves are kept in step by loads and stores of words that one side alone stores. A host whose stores never
// reach the other ends the litmus by its deadline.

// ScratchBytes is the memory that the litmus uses.
const ScratchBytes = 1 << 20

// ErrIncoherent means that the hosts do not see one memory.
var ErrIncoherent = errors.New("the hosts do not see one coherent memory: it must not carry Quarry")

// Result is the outcome of one program, of both sides together.
type Result struct {
	Name   string `json:"name"`
	Asks   string `json:"asks"`
	Rounds uint64 `json:"rounds"` // steps
	Met    uint64 `json:"met"`    // steps in which a side saw what the other had just done
	Bad    uint64 `json:"bad"`    // forbidden outcomes
}

// Report is the outcome of all programs.
type Report struct {
	Results []Result `json:"results"`
}

// Err names the first program that has seen something forbidden.
func (r *Report) Err() error {
	for _, x := range r.Results {
		if x.Bad > 0 {
			return fmt.Errorf("%w: %s: %d of %d", ErrIncoherent, x.Name, x.Bad, x.Rounds)
		}
	}
	return nil
}

// Places in the scratch memory. A side stores to its own control block alone.
const (
	controlBytes = 4096 // of a side's control words, each in lines of its own
	atNonce      = 0    // of the side's run
	atEcho       = 128  // the other's nonce, as this side has seen it
	atStep       = 256  // tag of the run, and meetings
	atCount      = 384  // two numbers for the other side
	counter      = 2 * controlBytes
	flag         = counter + 128
	arrays       = 64 << 10 // of the programs
)

const (
	batch    = 2048  // steps of each side between two meetings, of programs with arrays
	increase = 16384 // the same, of the others
	// enoughBatches is how many batches a program has at least.
	enoughBatches = 4
	// patience is how long the other side may take for a batch, since hosts have other work, and a program in which the sides
	// hardly meet.
	patience = 2 * time.Minute
)

// side is one host's part of a run.
type side struct {
	ctx      context.Context
	w        words
	me       int // 0 or 1
	patience time.Duration
	tag      uint64 // of the run, in the bits from stepBits on: the other's words of earlier runs have another one
	step     uint64 // meetings so far
	met      uint64 // of the present batch, as this side has counted
	bad      uint64 // likewise
}

const stepBits = 24

// program is run by both sides. The batches have numbers from 1 on. batch is one batch of a side's steps; check, when both have done
// it, looks for forbidden outcomes.
type program struct {
	name, asks string
	steps      uint64 // of a side in a batch
	enough     uint64 // how often the sides must have met: hosts that run one after the other find nothing
	clears     int    // bytes from arrays on that are zero when a batch begins
	batch      func(s *side, n uint64)
	check      func(s *side)
}

var programs = []program{
	{"add", "increments by FETCH_ADD from two hosts, lost", increase, 2000, 0, addBatch, countCheck},
	{"cas", "increments by CAS from two hosts, lost", increase, 2000, 0, casBatch, countCheck},
	{"store-load", "pairs of stores of which neither host saw the other's", batch, 200, 2 * batch * 64, storeLoad, storeLoadCheck},
	{"write-flag", "flags that were seen before the bytes written in front of them", records, 500, records * recordBytes, writeFlag, nil},
	{"word", "aligned words of 8 bytes seen torn", increase, 500, 0, wholeWords, nil},
}

// Litmus runs all programs on scratch memory with the other host, which calls it with the same memory and the other side, 0 or 1.
// This call waits for it for a time. What the memory holds is overwritten. Both get the same report.
// Preconditions: scratch is ScratchBytes long and begins at a multiple of 64.
func Litmus(ctx context.Context, scratch []byte, me int, wait time.Duration) (Report, error) {
	return ask(ctx, scratch, me, passable(), wait)
}

// replaced are programs of tests, for those that a host has to pass before it is let in.
var replaced atomic.Pointer[[]program]

// joining are the programs that a host has to pass before it is let in.
func joining() []program {
	if p := replaced.Load(); p != nil {
		return *p
	}
	return passable()
}

// passable are the programs that coherent memory passes in this build.
func passable() []program {
	return slices.DeleteFunc(slices.Clone(programs), func(p program) bool { return raced && p.name == "store-load" })
}

func ask(ctx context.Context, scratch []byte, me int, programs []program, wait time.Duration) (Report, error) {
	s := &side{ctx: ctx, w: mapped{scratch[:ScratchBytes]}, me: me, patience: patience}
	return s.litmus(programs, wait)
}

// litmus greets the other side and runs programs.
func (s *side) litmus(programs []program, wait time.Duration) (Report, error) {
	var r Report
	if err := s.greet(wait); err != nil {
		return r, fmt.Errorf("litmus: %w", err)
	}
	for _, p := range programs {
		x, err := s.run(&p)
		if err != nil {
			return r, fmt.Errorf("litmus %s: %w", p.name, err)
		}
		r.Results = append(r.Results, x)
	}
	return r, nil
}

// mine and theirs are the places of control words.
func (s *side) mine(at int) int   { return s.me*controlBytes + at }
func (s *side) theirs(at int) int { return (1-s.me)*controlBytes + at }

// errNoOther is why a side gave up.
var errNoOther = errors.New("no store of the other host arrives: it does not run its side, or the memory is not shared or not coherent")

// await waits until f says so, or a limit has passed.
func (s *side) await(limit time.Duration, f func() bool) error {
	began := time.Now()
	for n := 1; !f(); n++ {
		if n%256 != 0 {
			continue
		}
		waited := time.Since(began)
		switch {
		case s.ctx.Err() != nil:
			return fmt.Errorf("%w: %w", errNoOther, s.ctx.Err())
		case waited > limit:
			return fmt.Errorf("%w (waited %v)", errNoOther, limit)
		case waited > time.Millisecond:
			time.Sleep(50 * time.Microsecond)
		}
	}
	return nil
}

// greet waits for the other side and agrees on the run's tag.
// Invariant: a side stores its nonce before it echoes the other's. So the side whose nonce is echoed loads the other's present nonce behind that.
func (s *side) greet(wait time.Duration) error {
	var b [8]byte
	rand.Read(b[:])
	nonce := binary.LittleEndian.Uint64(b[:])>>stepBits | 1
	s.w.store(s.mine(atStep), 0)
	s.w.store(s.mine(atEcho), 0)
	s.w.store(s.mine(atNonce), nonce)
	return s.await(wait, func() bool {
		other := s.w.load(s.theirs(atNonce))
		s.w.store(s.mine(atEcho), other)
		if s.w.load(s.theirs(atEcho)) != nonce {
			return false
		}
		other = s.w.load(s.theirs(atNonce))
		s.w.store(s.mine(atEcho), other)
		s.tag = (nonce + other) << stepBits
		return true
	})
}

// meet waits until the other side has come as far, and exchanges a number.
func (s *side) meet(number uint64) (other uint64, err error) {
	s.step++
	at := atCount + int(s.step%2)*8 // of two places: a side may be one meeting ahead
	s.w.store(s.mine(at), number)
	s.w.store(s.mine(atStep), s.tag|s.step)
	err = s.await(s.patience, func() bool {
		there := s.w.load(s.theirs(atStep))
		return there>>stepBits == s.tag>>stepBits && there >= s.tag|s.step
	})
	return s.w.load(s.theirs(at)), err
}

// run runs a program until the sides have met often enough.
func (s *side) run(p *program) (Result, error) {
	x := Result{Name: p.name, Asks: p.asks}
	began := time.Now()
	for n := uint64(1); ; n++ {
		s.met, s.bad = 0, 0
		if s.me == 0 {
			s.clear(p.clears)
		}
		if _, err := s.meet(0); err != nil {
			return x, err
		}
		p.batch(s, n)
		if _, err := s.meet(0); err != nil {
			return x, err
		}
		if p.check != nil {
			p.check(s)
		}
		// Both sides go on or end by the same numbers. late is the one that they measure.
		late := uint64(0)
		if time.Since(began) > s.patience {
			late = 1
		}
		met, err := s.meet(s.met)
		bad, err2 := s.meet(s.bad)
		late2, err3 := s.meet(late)
		if err := errors.Join(err, err2, err3); err != nil {
			return x, err
		}
		x.Rounds, x.Met, x.Bad = x.Rounds+2*p.steps, x.Met+met+s.met, x.Bad+bad+s.bad
		switch {
		case x.Bad > 0 || x.Met >= p.enough && n >= enoughBatches:
			return x, nil
		case late+late2 > 0:
			return x, fmt.Errorf("the hosts ran one after the other: %d of %d steps met, want %d: try again when they have less to do", x.Met, x.Rounds, p.enough)
		}
	}
}

// clear zeroes the words that both sides change, and the beginning of the arrays.
func (s *side) clear(bytes int) {
	s.w.store(counter, 0)
	s.w.store(flag, 0)
	if bytes > 0 {
		s.w.write(arrays, make([]byte, bytes))
	}
}

// addBatch adds to the counter. An old value that is not this side's last one shows the other's.
func addBatch(s *side, _ uint64) {
	last := uint64(0)
	for range increase {
		old := s.w.add(counter, 1)
		if old != last {
			s.met++
		}
		last = old + 1
	}
}

// casBatch increments the counter by CAS.
func casBatch(s *side, _ uint64) {
	seen := uint64(0)
	for range increase {
		for {
			old := s.w.cas(counter, seen, seen+1)
			if old == seen {
				seen++
				break
			}
			seen = old
			s.met++
		}
	}
}

// countCheck compares the counter with what both sides have added.
func countCheck(s *side) {
	if have, want := s.w.load(counter), uint64(2*increase); s.me == 0 {
		s.bad = max(have, want) - min(have, want)
	}
}

// pair is the place of a side's line of a pair: the word that it stores, and at seenAt what it has loaded of the other's, plus 1.
func pair(side, i int) int { return arrays + (side*batch+i)*64 }

const seenAt = 32

// storeLoad stores the own word of a pair and loads the other's. Every few pairs it waits a little for a side that is behind, so that
// both come to a pair at about the same time.
func storeLoad(s *side, _ uint64) {
	const apart, patience = 4, 2000
	for i := range batch {
		for n := 0; i%apart == 0 && i > 0 && n < patience && s.w.load(pair(1-s.me, i-apart)+seenAt) == 0; n++ {
		}
		s.w.store(pair(s.me, i), 1)
		r := s.w.load(pair(1-s.me, i))
		s.w.store(pair(s.me, i)+seenAt, r+1)
	}
}

// storeLoadCheck counts pairs in which both saw the other's store, and those in which neither did.
func storeLoadCheck(s *side) {
	for i := 0; i < batch && s.me == 0; i++ {
		switch s.w.load(pair(0, i)+seenAt) + s.w.load(pair(1, i)+seenAt) {
		case 4:
			s.met++
		case 2:
			s.bad++
		}
	}
}

// Records of writeFlag.
const (
	records     = 1024
	recordBytes = 256
)

// writes says which side writes in a batch of writeFlag and wholeWords: they take turns.
func (s *side) writes(n uint64) bool { return s.me == int(n%2) }

// writeFlag writes records, each in front of the flag, and looks at the other's newest one.
func writeFlag(s *side, n uint64) {
	b := make([]byte, recordBytes)
	if s.writes(n) {
		for i := uint64(1); i < records; i++ {
			fill(b, i)
			s.w.write(arrays+int(i)*recordBytes, b)
			s.w.store(flag, i)
		}
		return
	}
	last := uint64(0)
	_ = s.await(s.patience, func() bool { // if the writer has ended the next meeting says so
		i := s.w.load(flag)
		if i != last && i < records {
			s.met++
			if s.w.read(arrays+int(i)*recordBytes, b); !filled(b, i) {
				s.bad++
			}
		}
		last = i
		return i == records-1
	})
}

// wholeWords has one side store words of equal bytes, and the other look at them.
func wholeWords(s *side, n uint64) {
	if s.writes(n) {
		for i := range uint64(increase) {
			s.w.store(counter, ^uint64(0)*(i&1))
		}
		s.w.store(flag, 1)
		return
	}
	last := uint64(0)
	_ = s.await(s.patience, func() bool {
		v := s.w.load(counter)
		if v != last {
			s.met++
		}
		if last = v; v != 0 && v != ^uint64(0) {
			s.bad++
		}
		return s.w.load(flag) == 1
	})
}

// fill sets every word of b to v.
func fill(b []byte, v uint64) {
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], v)
	}
}

// filled says whether every word of b is v.
func filled(b []byte, v uint64) bool {
	for i := 0; i < len(b); i += 8 {
		if binary.LittleEndian.Uint64(b[i:]) != v {
			return false
		}
	}
	return true
}
