package fsck

import (
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

const (
	// comparePiece is how many bytes of a backup a hash stands for. Where clients write, a smaller piece is more often
	// the primary's, and costs a verb more.
	comparePiece  = 32 << 10
	comparePieces = proto.BlockBytes / comparePiece
)

// readBlock READs header and map of a block, and its bytes at every replica. A backup that is behind a network is asked for the
// hashes of its pieces; those with the primary's hash count as READ, and the others are READ in a second round.
func (c *check) readBlock(w *work, b uint32) error {
	off := w.g.BlockOff(b)
	c.round.Reset()
	for i, t := range w.Replicas {
		ch := c.round.Chain(t)
		if i == 0 {
			ch.Read(w.g.HeaderOff(b), c.words[:8])
			ch.Read(w.g.MapOff(b), c.maps)
		}
		if i == 0 || !t.Compares() {
			ch.Read(off, c.blocks[i])
			continue
		}
		for p := range uint64(comparePieces) {
			ch.Verify(off+p*comparePiece, comparePiece, w.seed)
		}
	}
	if err := c.do(w); err != nil {
		return err
	}
	var differ [][comparePieces]bool // of each replica
	for i, t := range w.Replicas {
		if i == 0 || !t.Compares() {
			continue
		}
		if differ == nil {
			differ = make([][comparePieces]bool, len(w.Replicas))
		}
		for p := range comparePieces {
			primary := c.blocks[0][p*comparePiece:][:comparePiece]
			if differ[i][p] = c.round.At(i).Verbs[p].Old != rdma.Hash(primary, w.seed); !differ[i][p] {
				copy(c.blocks[i][p*comparePiece:], primary)
				w.stat.AlikeBytes += comparePiece
			}
		}
	}
	c.round.Reset()
	for i := range differ {
		var ch *rdma.Chain
		for p, reads := range differ[i] {
			if !reads {
				continue
			}
			if ch == nil {
				ch = c.round.Chain(w.Replicas[i])
			}
			ch.Read(off+uint64(p)*comparePiece, c.blocks[i][p*comparePiece:][:comparePiece])
		}
	}
	if c.round.Len() == 0 {
		return nil
	}
	return c.more(w)
}
