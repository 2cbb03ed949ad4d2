package rdma

import (
	"fmt"

	"github.com/zeebo/xxh3"
)

// Op is the kind of a verb.
type Op uint8

const (
	Read        Op = iota + 1 // memory to Buf
	Write                     // Buf to memory
	CompareSwap               // a word, if it has the expected value
	FetchAdd                  // adds to a word
	Flush                     // waits until earlier WRITEs and atomics are visible, or persistent
	Verify                    // answers the hash of a range, which the responder computes
	ops
)

// Ops is one more than the highest Op, for arrays indexed by Op.
const Ops = int(ops)

func (o Op) String() string {
	switch o {
	case Read:
		return "READ"
	case Write:
		return "WRITE"
	case CompareSwap:
		return "CAS"
	case FetchAdd:
		return "FETCH_ADD"
	case Flush:
		return "FLUSH"
	case Verify:
		return "VERIFY"
	}
	return fmt.Sprintf("op %d", uint8(o))
}

// FlushKind is what a FLUSH waits for.
type FlushKind uint8

const (
	// Visible: the WRITEs and atomics that it is ordered behind are visible to every process.
	Visible FlushKind = iota
	// Persistent: they also survive a loss of power. Refused by memory that is not persistent.
	Persistent
)

// Verb is one one-sided operation on a window. Offsets are bytes from the
// window's start. An empty READ, WRITE, FLUSH or VERIFY is refused with ErrBounds.
type Verb struct {
	Op    Op        // what the responder does
	Fence bool      // ordered, with all behind it, after earlier READs, atomics and FLUSHes of the chain
	Kind  FlushKind // FLUSH only
	Off   uint64    // bytes from the window's start; a multiple of 8 for CAS and FETCH_ADD
	// Buf receives a READ and feeds a WRITE.
	Buf []byte
	// Bytes is the length of the range of a FLUSH or a VERIFY.
	Bytes uint64
	// Expect and New belong to CAS: the word becomes New if it was Expect.
	// New is the addend of FETCH_ADD, and the seed of VERIFY.
	Expect, New uint64
	// Old is the answer. CAS, FETCH_ADD: the word as it was before. VERIFY: the hash; see Hash.
	Old uint64
}

// Len is the number of bytes of the window that the verb touches.
func (v *Verb) Len() uint64 {
	switch v.Op {
	case Read, Write:
		return uint64(len(v.Buf))
	case Flush, Verify:
		return v.Bytes
	}
	return 8
}

// Swapped says whether the word has the new value because of this CAS, or had it before. The
// second case is that of a CAS which is repeated after a lost answer, and finds what its first
// try wrote; the caller makes sure that no other operation can have written that value.
func (v *Verb) Swapped() bool { return v.Old == v.Expect || v.Old == v.New }

// Limits of one chain and one verb. A chain beyond them is refused with ErrLimit
// before any of it runs, by every provider: queue pairs have that many work requests.
const (
	MaxChainVerbs = 256
	// MaxVerbBytes is the longest READ, WRITE or VERIFY: the largest slab.
	MaxVerbBytes = 1 << 20
	// MaxChainBytes bounds the READs, WRITEs and VERIFYs of one chain together: what a fence may have
	// to wait for.
	MaxChainBytes = 4 << 20
)

// WithinLimits says whether the limits allow a chain of these verbs, before any of
// them runs: ErrLimit, or nil.
func WithinLimits(verbs []Verb) error {
	if len(verbs) > MaxChainVerbs {
		return ErrLimit
	}
	var bytes uint64
	for i := range verbs {
		v := &verbs[i]
		switch v.Op {
		case Read, Write:
			if len(v.Buf) > MaxVerbBytes {
				return ErrLimit
			}
			bytes += uint64(len(v.Buf))
		case Verify:
			if v.Bytes > MaxVerbBytes {
				return ErrLimit
			}
			bytes += v.Bytes
		case CompareSwap, FetchAdd:
		case Flush:
			if v.Kind > Persistent {
				return ErrLimit
			}
		default:
			return ErrLimit
		}
	}
	if bytes > MaxChainBytes {
		return ErrLimit
	}
	return nil
}

// Hash is what a VERIFY of these bytes answers: their XXH3-64 with a seed. It detects accidental differences. A writer
// that chooses the bytes can produce two ranges with one hash.
func Hash(b []byte, seed uint64) uint64 { return xxh3.HashSeed(b, seed) }

// Window is the right to a region's memory under one epoch: what Open returned.
type Window struct {
	Region uint32      // number in the table
	Epoch  uint64      // the key is valid while the node serves the region under this epoch
	Key    uint64      // checked by the responder with every verb; never a secret
	Base   uint64      // address of offset 0 as the responder counts it (0 unless a device counts otherwise)
	Bytes  uint64      // size of the region; a verb beyond it is refused with ErrBounds
	Slot   int32       // the provider's own index of the window on this connection
	Flush  FlushMethod // how a persistent FLUSH is carried out, as the node has told
	// Verifies: the responder answers VERIFY. It is false of nodes of earlier versions. A chain with a VERIFY is refused with ErrUnsupported there.
	Verifies bool
}

// Target is where a chain goes: a window over a connection.
type Target struct {
	Conn   Conn   // a lane's connection; its owner alone posts on it
	Window Window // opened on Conn
}

// Compares says whether a program that expects the bytes of a range should VERIFY them before it READs them: the
// responder has the verb, and is not the client's own processor, for which a READ moves no bytes and costs less.
func (t *Target) Compares() bool {
	_, near := t.Conn.(Near)
	return t.Window.Verifies && !near
}

// Chain is a list of verbs for one target.
type Chain struct {
	To    *Target // where the verbs run; set by Reset
	Verbs []Verb  // executed in order; not changed between Post and the return of Wait, but for Old
	// Err is the outcome once the round has been awaited:
	//   nil             every verb has run
	//   wraps ErrRefused  verbs before Done have run, the others never will
	//   wraps ErrBroken   verbs before Done have run, the others may have, or still may
	Err  error
	Done int // verbs that have run for certain, from the first on
}

// Read appends a READ of len(buf) bytes at off and returns its index in Verbs.
func (c *Chain) Read(off uint64, buf []byte) int {
	return c.add(Verb{Op: Read, Off: off, Buf: buf})
}

// Write appends a WRITE of buf at off.
func (c *Chain) Write(off uint64, buf []byte) int {
	return c.add(Verb{Op: Write, Off: off, Buf: buf})
}

// CAS appends a compare-and-swap of the word at off.
func (c *Chain) CAS(off, expect, new uint64) int {
	return c.add(Verb{Op: CompareSwap, Off: off, Expect: expect, New: new})
}

// FetchAdd appends an atomic addition to the word at off.
func (c *Chain) FetchAdd(off, addend uint64) int {
	return c.add(Verb{Op: FetchAdd, Off: off, New: addend})
}

// Flush appends a FLUSH of a range.
func (c *Chain) Flush(kind FlushKind, off, bytes uint64) int {
	return c.add(Verb{Op: Flush, Kind: kind, Off: off, Bytes: bytes})
}

// Verify appends a VERIFY of a range: Old becomes Hash of its bytes with a seed. Bytes that are changed
// at the same time count as a READ may return them.
func (c *Chain) Verify(off, bytes, seed uint64) int {
	return c.add(Verb{Op: Verify, Off: off, Bytes: bytes, New: seed})
}

// Fenced orders the last verb appended, and those that will follow it, after all earlier READs,
// atomics and FLUSHes.
func (c *Chain) Fenced() *Chain {
	c.Verbs[len(c.Verbs)-1].Fence = true
	return c
}

// Refused is why no verb of the chain runs, whatever the responder says: ErrLimit or ErrUnsupported, or nil.
func (c *Chain) Refused() error {
	if err := WithinLimits(c.Verbs); err != nil || c.To.Window.Verifies {
		return err
	}
	for i := range c.Verbs {
		if c.Verbs[i].Op == Verify {
			return ErrUnsupported
		}
	}
	return nil
}

// add appends a verb and returns its index.
func (c *Chain) add(v Verb) int {
	c.Verbs = append(c.Verbs, v)
	return len(c.Verbs) - 1
}

// Reset empties the chain and aims it at a target, keeping its storage.
func (c *Chain) Reset(to *Target) {
	c.To, c.Verbs, c.Err, c.Done = to, c.Verbs[:0], nil, 0
}
