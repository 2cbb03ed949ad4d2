package fsck

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto"
)

// Repaired is what became of the findings of one check. Check again afterwards:
// only a second check says what is whole.
type Repaired struct {
	Objects int `json:"objects"` // given whole and equal replicas
	Slabs   int `json:"slabs"`   // without an object, given equal replicas
	Words   int `json:"words"`   // of maps and reservations, set right
	Chunks  int `json:"chunks"`  // that no object named, freed
	Marked  int `json:"marked"`  // objects that are lost: their slabs have been marked BAD
	Names   int `json:"names"`   // of marks that were not there any more, deleted
	// Left are findings that nothing can be done about, with the reason.
	Left []string `json:"left"`
}

// Add adds what another repair has done.
func (r *Repaired) Add(o *Repaired) {
	r.Objects += o.Objects
	r.Slabs += o.Slabs
	r.Words += o.Words
	r.Chunks += o.Chunks
	r.Marked += o.Marked
	r.Names += o.Names
	r.Left = append(r.Left, o.Left...)
}

// leave records a finding that was not repaired.
func (r *Repaired) leave(f Finding, why string) {
	r.Left = append(r.Left, fmt.Sprintf("%s: %s", f, why))
}

// repairTimeout bounds one repair: the session that holds the slab may have to be fenced first.
const repairTimeout = 15 * time.Second

// Repair repairs what a check has found, with an ordinary session beside all others:
// damaged images from a whole replica, replicas that differ by the primary, maps by the
// words of their slabs, what sessions left that are fenced or unknown, and orphaned chunks. Slabs whose objects are lost are
// marked BAD, and listed among the names.
func Repair(ctx context.Context, c *client.Client, findings []Finding) (*Repaired, error) {
	r := repairer{c: c, done: &Repaired{Left: []string{}}, blocks: map[[2]uint32]bool{}}
	for i := range findings {
		f := &findings[i]
		err := r.repair(ctx, f)
		if ctx.Err() != nil {
			return r.done, ctx.Err()
		}
		if err != nil && !errors.Is(err, client.ErrFreed) { // its owner has settled it
			r.done.leave(*f, err.Error())
		}
	}
	return r.done, nil
}

// repairer is one call of Repair.
type repairer struct {
	c      *client.Client     // repairs under its session
	done   *Repaired          // what it has done
	blocks map[[2]uint32]bool // region and block: repaired, with all findings in it
}

// repair repairs what a finding is about, by the way of its kind.
func (r *repairer) repair(ctx context.Context, f *Finding) error {
	ctx, cancel := context.WithTimeout(ctx, repairTimeout)
	defer cancel()
	switch {
	case f.Kind == KindLeak && f.chunk:
		return r.freeChunk(ctx, f)
	case (f.Kind == KindMap || f.Kind == KindLeak || f.Kind == KindReservation) && f.inBlock:
		return r.repairBlock(ctx, f)
	case (f.Kind == KindImage || f.Kind == KindReplica) && f.ref != (proto.Ref{}):
		err := r.c.Repair(ctx, f.ref)
		if errors.Is(err, client.ErrCorrupt) && !errors.Is(err, client.ErrBad) { // damaged at the others since
			return r.mark(ctx, f)
		}
		return counted(&r.done.Objects, err)
	case f.Kind == KindReplica && f.inBlock:
		return counted(&r.done.Slabs, r.c.RepairFree(ctx, f.addr))
	case f.Kind == KindImage:
		return r.mark(ctx, f)
	case f.Kind == KindBad:
		return isBad(r.c.ListBad(ctx, f.Mark))
	}
	return errors.New("no repair is known for this finding")
}

// mark marks the slab of an object that no repair can mend. The finding is left: the object is lost.
func (r *repairer) mark(ctx context.Context, f *Finding) error {
	mark, err := r.c.MarkBad(ctx, f.addr)
	if mark.IsZero() {
		return err
	}
	r.done.Marked++
	return isBad(err)
}

// isBad is why the finding of a slab that is marked is left; listed is the error of listing it.
func isBad(listed error) error {
	if listed != nil {
		return fmt.Errorf("%w; it could not be listed: %w", client.ErrBad, listed)
	}
	return client.ErrBad
}

// freeChunk frees an orphaned chunk. An orphan stays one: see slab.Survey.
func (r *repairer) freeChunk(ctx context.Context, f *Finding) error {
	err := r.c.CompareAndFree(ctx, f.ref, f.version)
	if errors.Is(err, client.ErrFreed) {
		err = nil
	}
	return counted(&r.done.Chunks, err)
}

// repairBlock repairs the whole block of a finding, once.
func (r *repairer) repairBlock(ctx context.Context, f *Finding) error {
	at := [2]uint32{f.Region, f.block}
	if r.blocks[at] {
		return nil
	}
	r.blocks[at] = true
	n, err := r.c.RepairBlock(ctx, f.Region, f.block)
	r.done.Words += n
	return err
}

// counted adds one to n if there was no error.
func counted(n *int, err error) error {
	if err == nil {
		*n++
	}
	return err
}
