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
// only that says what is right.
type Repaired struct {
	Objects int `json:"objects"` // given whole and equal replicas
	Slabs   int `json:"slabs"`   // without an object, given equal replicas
	Words   int `json:"words"`   // of maps and reservations, set right
	Chunks  int `json:"chunks"`  // that no object named, freed
	// Left are findings that nothing can be done about, with the reason.
	Left []string `json:"left"`
}

func (r *Repaired) leave(f Finding, why string) {
	r.Left = append(r.Left, fmt.Sprintf("%s: %s", f, why))
}

// mendTimeout bounds the mending of one thing: who holds it may have to be fenced first.
const mendTimeout = 15 * time.Second

// Repair mends what a check has found, with an ordinary session beside all others:
// damaged images from a replica that is whole, replicas that differ by the primary,
// maps by the slabs' words, what sessions left that are fenced or unknown.
func Repair(ctx context.Context, c *client.Client, findings []Finding) (*Repaired, error) {
	done := &Repaired{Left: []string{}}
	type place struct{ region, block uint32 }
	blocks := map[place]bool{}
	for _, f := range findings {
		mctx, cancel := context.WithTimeout(ctx, mendTimeout)
		var err error
		switch {
		case f.Kind == KindLeak && f.chunk:
			if err = c.Free(mctx, f.ref); err == nil || errors.Is(err, client.ErrFreed) {
				done.Chunks++
				err = nil
			}
		case (f.Kind == KindMap || f.Kind == KindLeak || f.Kind == KindReservation) && f.inBlock:
			at := place{f.Region, f.block}
			if blocks[at] {
				break // with the first of its block
			}
			blocks[at] = true
			var n int
			n, err = c.MendBlock(mctx, f.Region, f.block)
			done.Words += n
		case (f.Kind == KindImage || f.Kind == KindReplica) && f.ref != (proto.Ref{}):
			if err = c.Mend(mctx, f.ref); err == nil {
				done.Objects++
			}
		case f.Kind == KindReplica && f.inBlock:
			if err = c.MendFree(mctx, f.addr); err == nil {
				done.Slabs++
			}
		case f.Kind == KindImage:
			err = client.ErrCorrupt
		default:
			err = errors.New("not known how to mend this")
		}
		cancel()
		if ctx.Err() != nil {
			return done, ctx.Err()
		}
		if err != nil && !errors.Is(err, client.ErrFreed) { // its owner has settled it
			done.leave(f, err.Error())
		}
	}
	return done, nil
}
