package raw

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
)

// This file makes replicas alike: behind a failover, and beside clients where one is rebuilt.

// refusal says whether an error is a node's refusal.
func refusal(err error) bool { return errors.Is(err, rdma.ErrRefused) }

// buffer is memory for a piece of replica k.
func (l *Lane) buffer(k int) ([]byte, error) {
	if l.bufs[k] == nil {
		b, err := l.port.Buffer(proto.BlockBytes)
		if err != nil {
			return nil, err
		}
		l.bufs[k] = b
	}
	return l.bufs[k], nil
}

// plain sends the round, unless it is empty. Reconcile gives up at the first failure: the caller starts it again.
func (l *Lane) plain() error {
	if l.lane.Round().Len() == 0 {
		return nil
	}
	l.lane.Do()
	return l.lane.Round().Err()
}

// ReconcileBlock makes piece b of the data of the replicas in sync alike, for a new epoch: the first wins. With piece 0 it clears the
// reservations. Preconditions and repetition: as slab.Reconcile. It returns the bytes it has copied.
func (l *Lane) ReconcileBlock(reg *slab.Region, b uint32) (copied uint64, _ error) {
	if b == 0 {
		if err := l.clearWords(reg); err != nil {
			return 0, fmt.Errorf("reconcile region %d: %w", reg.ID, err)
		}
	}
	copied, err := l.reconcileBlock(reg, b)
	if err != nil {
		err = fmt.Errorf("reconcile piece %d of region %d: %w", b, reg.ID, err)
	}
	return copied, err
}

// clearWords clears the reservations of the next primary. Only the primary's reservations are used; each new primary is cleared here.
func (l *Lane) clearWords(reg *slab.Region) error {
	zero, err := l.buffer(0)
	if err != nil {
		return err
	}
	zero = zero[:8*proto.RawWords]
	clear(zero)
	r := l.lane.Round()
	r.Reset()
	r.Chain(reg.P()).Write(proto.RawWordsOff, zero)
	return l.plain()
}

func (l *Lane) reconcileBlock(reg *slab.Region, b uint32) (copied uint64, _ error) {
	off := reg.Geometry.BlockOff(b)
	r := l.lane.Round()
	r.Reset()
	insync := 0
	for k := range reg.N {
		if reg.Rebuilding[k] {
			continue
		}
		buf, err := l.buffer(k)
		if err != nil {
			return 0, err
		}
		r.Chain(reg.To[k]).Read(off, buf)
		insync++
	}
	if insync > 1 {
		if err := l.plain(); err != nil {
			return 0, err
		}
	}
	r.Reset()
	for k := range reg.N {
		if reg.Rebuilding[k] || !reg.Durable && (k == 0 || insync == 1) {
			continue
		}
		c := r.Chain(reg.To[k])
		if k > 0 && !bytes.Equal(l.bufs[0], l.bufs[k]) {
			c.Write(off, l.bufs[0])
			copied += proto.BlockBytes
		}
		if reg.Durable {
			// Bytes that are alike may not be durable everywhere: the writer may have died before its FLUSH.
			c.Flush(rdma.Persistent, off, proto.BlockBytes)
		}
	}
	for k := range r.Len() {
		if len(r.At(k).Verbs) > 0 {
			return copied, l.plain()
		}
	}
	return copied, nil
}

// copyUnit is how much of a piece is compared, and copied, at once.
const copyUnit = 64 << 10

// copyWrites is how often the copier WRITEs units of a piece that clients change meanwhile. Then it goes on word by word.
const copyWrites = 3

// CopyBlock brings piece b of the rebuilding replicas up to date beside clients. nil: within reg's epoch a rebuilding replica has received
// every byte of the primary, or a newer one.
//
// Invariant: writers WRITE to the primary first, and to a rebuilding replica behind its answer. So a word needs no more of the copier
// in two cases.
//
//   - The primary has a value at a READ, and the replica has the same value at a later READ. A writer that reaches the primary after
//     the first READ WRITEs to the replica too.
//   - The primary has a value at a READ, then the copier puts it into the replica, and the primary has the same value at a later READ.
//     The last writer before the later READ wrote this value, and each writer after it reaches the replica after the copier. A CAS of
//     the copier that finds another value than its READ of the replica did counts too: a writer has reached the replica since.
//
// The copier WRITEs what differs, and WRITEs again what has changed at the primary meanwhile, up to copyWrites times. If clients go on
// changing it, a WRITE could replace newer bytes each time; so the copier then changes words by CAS.
func (l *Lane) CopyBlock(reg *slab.Region, b uint32) (copied uint64, _ error) {
	for k := 1; k < reg.N; k++ {
		if !reg.Rebuilding[k] {
			continue
		}
		n, err := l.copyTo(reg, b, k)
		copied += n
		if err != nil {
			return copied, fmt.Errorf("copy piece %d of region %d: %w", b, reg.ID, err)
		}
	}
	return copied, nil
}

// copyTo is CopyBlock to replica k.
func (l *Lane) copyTo(reg *slab.Region, b uint32, k int) (copied uint64, _ error) {
	p, err := l.buffer(0)
	if err != nil {
		return 0, err
	}
	q, err := l.buffer(k)
	if err != nil {
		return 0, err
	}
	off, to := reg.Geometry.BlockOff(b), reg.To[k]
	d := differences{p: p, q: q}
	d.units = d.all[:0]
	for at := uint64(0); at < proto.BlockBytes; at += copyUnit {
		d.units = append(d.units, at)
	}
	if err = l.readUnits(reg, reg.P(), off, d.units, p); err == nil {
		err = l.readUnits(reg, to, off, d.units, q)
	}
	d.keepUnits()
	for n := 1; len(d.units) > 0 && err == nil; n++ {
		if err = l.port.Pause(0); err != nil {
			break
		}
		var bytes uint64
		if n <= copyWrites {
			bytes, err = l.writeUnits(reg, to, off, d.units, p)
		} else if err = l.readUnits(reg, to, off, d.units, q); err == nil {
			d.keepWords()
			bytes, err = l.swapWords(reg, to, off, &d)
		}
		copied += bytes
		if err == nil {
			err = l.readUnits(reg, reg.P(), off, d.units, q)
		}
		if d.keepUnits(); n == copyWrites {
			d.eachWord()
		}
		if n >= copyWrites {
			d.keepWords()
		}
		for _, at := range d.units {
			copy(p[at:][:copyUnit], q[at:][:copyUnit])
		}
	}
	return copied, err
}

// differences are the parts of a piece that the copier still has to look at.
type differences struct {
	p, q  []byte   // the piece, READ twice
	units []uint64 // offsets in the piece, rising
	words []uint64 // of the units, rising; not used while whole units are copied
	all   [proto.BlockBytes / copyUnit]uint64
}

// keepUnits keeps the units in which p and q differ.
func (d *differences) keepUnits() {
	d.units = slices.DeleteFunc(d.units, func(at uint64) bool { return bytes.Equal(d.p[at:][:copyUnit], d.q[at:][:copyUnit]) })
}

// eachWord looks at the units' words from now on, each for itself: one that clients keep changing does not hold up the others.
func (d *differences) eachWord() {
	for _, unit := range d.units {
		for at := unit; at < unit+copyUnit; at += 8 {
			d.words = append(d.words, at)
		}
	}
}

// keepWords keeps the words that differ in p and q, and their units.
func (d *differences) keepWords() {
	d.words = slices.DeleteFunc(d.words, func(at uint64) bool { return proto.Word(d.p[at:], 0) == proto.Word(d.q[at:], 0) })
	d.units = d.units[:0]
	for _, at := range d.words {
		if unit := at &^ (copyUnit - 1); len(d.units) == 0 || d.units[len(d.units)-1] != unit {
			d.units = append(d.units, unit)
		}
	}
}

// readUnits READs units of a piece at off, if there are any. What it has READ at a replica other than the primary is durable in a durable
// region: its writer may have died before its FLUSH.
func (l *Lane) readUnits(reg *slab.Region, to *rdma.Target, off uint64, units []uint64, into []byte) error {
	if len(units) == 0 {
		return nil
	}
	return l.step(reg, func(r *rdma.Round) {
		c := r.Chain(to)
		for _, at := range units {
			c.Read(off+at, into[at:][:copyUnit])
		}
		if to != reg.P() {
			flush(reg, c, off, proto.BlockBytes)
		}
	})
}

// writeUnits WRITEs units of a piece at off.
func (l *Lane) writeUnits(reg *slab.Region, to *rdma.Target, off uint64, units []uint64, from []byte) (copied uint64, _ error) {
	return uint64(len(units)) * copyUnit, l.step(reg, func(r *rdma.Round) {
		c := r.Chain(to)
		for _, at := range units {
			c.Write(off+at, from[at:][:copyUnit])
			flush(reg, c, off+at, copyUnit)
		}
	})
}

// swapWords changes words from what q has to what p has, by CAS.
func (l *Lane) swapWords(reg *slab.Region, to *rdma.Target, off uint64, d *differences) (copied uint64, _ error) {
	for words := range slices.Chunk(d.words, rdma.MaxChainVerbs-1) {
		err := l.step(reg, func(r *rdma.Round) {
			c := r.Chain(to)
			for _, at := range words {
				c.CAS(off+at, proto.Word(d.q[at:], 0), proto.Word(d.p[at:], 0))
			}
			first, last := words[0], words[len(words)-1]
			flush(reg, c, off+first, last+8-first)
		})
		if err != nil {
			return copied, err
		}
		copied += 8 * uint64(len(words))
	}
	return copied, nil
}

// step sends a round until it is answered, within the epoch.
func (l *Lane) step(reg *slab.Region, build func(r *rdma.Round)) error {
	ended, err := l.insist(reg, build)
	if ended && err == nil {
		err = slab.ErrEpochOver
	}
	return err
}
