package slab

import (
	"slices"

	"github.com/quarrystore/quarry/rdma"
)

// This file compares pieces of replicas by their hashes (VERIFY), so that the bytes are not moved. Two pieces with
// the same XXH3-64 count as equal. A session that makes two images of one hash on purpose gains nothing: it has the keys
// of all replicas, and can store different images of one version that are whole.

// maxUnlike bounds the pieces of a replica in a row that are not compared.
const maxUnlike = 1 << 10

// unlike decides for a replica which pieces are READ without a VERIFY. After each piece that differs, twice as many pieces are READ
// without a VERIFY, because a VERIFY that differs costs a hash and, in a reconcile, a round.
type unlike struct {
	pieces int // not to be compared from now on
	last   int // how many that was when a piece differed last
}

// compares says whether the replica is asked for the hash of the next piece.
func (u *unlike) compares() bool {
	if u.pieces > 0 {
		u.pieces--
		return false
	}
	return true
}

// learn notes whether a piece was that of the primary.
func (u *unlike) learn(alike bool) {
	if u.last = min(2*u.last+1, maxUnlike); alike {
		u.last = 0
	}
	u.pieces = u.last
}

// asks chooses the replicas, of those given, that are to be asked for the hash of the next piece.
func (l *Lane) asks(reg *Region, of *[MaxListed]bool) (asked [MaxListed]bool) {
	for i := 1; i < reg.N; i++ {
		asked[i] = of[i] && reg.Compares[i] && l.unlike[i].compares()
	}
	return asked
}

// readAlike READs a piece of a block at every replica into buf, to each replica's number times stride.
// A replica whose piece is known to be the primary's gets a copy of that: nothing but the reconcile writes, so a
// READ would bring the same.
func (l *Lane) readAlike(reg *Region, off, n uint64, buf []byte, stride int, thenFlush bool, st *Reconciled) error {
	var old [MaxListed]bool
	for i := range reg.N {
		old[i] = !reg.Fresh[i]
	}
	asked := l.asks(reg, &old)
	piece := func(i int) []byte { return buf[i*stride:][:n] }
	l.round.Reset()
	for i := range reg.N {
		if reg.Fresh[i] {
			clear(piece(i))
			continue
		}
		c := l.round.Chain(reg.To[i])
		if asked[i] {
			c.Verify(off, n, reg.Seed)
		} else {
			c.Read(off, piece(i))
		}
		if thenFlush {
			flush(c, off, n)
		}
	}
	if err := l.doPlain(); err != nil || !slices.Contains(asked[:], true) {
		return err
	}
	hash := rdma.Hash(piece(0), reg.Seed)
	for i, k := 0, 0; i < reg.N; i++ {
		if reg.Fresh[i] {
			continue
		}
		if asked[i] {
			asked[i] = l.round.At(k).Verbs[0].Old != hash // from here on: it has to be READ
			if l.unlike[i].learn(!asked[i]); !asked[i] {
				copy(piece(i), piece(0))
				st.Alike += int(n)
			}
		}
		k++
	}
	l.round.Reset()
	for i := range reg.N {
		if asked[i] {
			l.round.Chain(reg.To[i]).Read(off, piece(i))
		}
	}
	return l.doPlain()
}

// readPiece READs a piece of a block at the primary. alike: every rebuilding replica has the same bytes, and they
// are durable there in a durable region.
//
// A slab of such a piece that has R = 0 needs no copy. When the primary's bytes were READ no session held it. Only a
// holder of R and the copier move its V at a rebuilding replica, so V there is the primary's from then on, whichever of the
// two was looked at first: every later commit finds the V there that it expects. And the image is the same, byte by byte. A slab that is
// held is not alike: R of a rebuilding replica is always 0.
func (l *Lane) readPiece(reg *Region, off uint64, buf []byte) (alike bool, err error) {
	asked := l.asks(reg, &reg.Rebuilding)
	err = l.repeat(reg, func() {
		l.round.Chain(reg.P()).Read(off, buf)
		for i := range reg.N {
			if !asked[i] {
				continue
			}
			c := l.round.Chain(reg.To[i])
			c.Verify(off, uint64(len(buf)), reg.Seed)
			if reg.Durable { // the writer may have died before its FLUSH
				flush(c, off, uint64(len(buf)))
			}
		}
	})
	if err != nil || l.round.Len() == 1 {
		return false, err
	}
	alike = true
	hash := rdma.Hash(buf, reg.Seed)
	for i, k := 0, 1; i < reg.N; i++ {
		switch {
		case asked[i]:
			same := l.round.At(k).Verbs[0].Old == hash
			l.unlike[i].learn(same)
			alike = alike && same
			k++
		case reg.Rebuilding[i]:
			alike = false
		}
	}
	return alike, nil
}

// forgetAlike forgets what needs no copy of a piece that is alike: FREE slabs, and LIVE ones with a whole image. An
// image that is damaged may be whole at another replica.
func (k *copies) forgetAlike() {
	k.free = k.free[:0]
	k.live = slices.DeleteFunc(k.live, func(c copying) bool { return c.img != nil })
}
