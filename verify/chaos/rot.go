package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
)

// rots is how many payloads one injection spoils in each region of a node.
const rots = 40

// payloadText is how payloads begin in memory, behind the header of their image;
// see payload.
var payloadText = regexp.MustCompile(`[^ 0-9a-z]w[0-9]+t[0-9]+n[0-9]+ `)

// rot flips a bit in payloads of one node's regions, in the files that the node has mapped, as a
// bad disk or bad memory does. One byte is written at a time, so
// nothing beside it is undone. Some of it is in images that V does not name, which no client reads.
func rot(_ context.Context, r *run) error {
	paths, err := filepath.Glob(filepath.Join(r.cluster.NodeDir(r.pickNode()), "region-*"))
	if err != nil {
		return err
	}
	for _, path := range paths {
		if err := rotFile(path); err != nil {
			return err
		}
	}
	return nil
}

func rotFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	found := payloadText.FindAllIndex(b, -1)
	for range min(rots, len(found)) {
		at := found[rand.IntN(len(found))][0] + 1
		if _, err := f.WriteAt([]byte{b[at] ^ 1<<rand.IntN(3)}, int64(at)); err != nil {
			return err
		}
	}
	return nil
}

// repair has fsck repair the damage that no client has read since.
func repair(ctx context.Context, r *run) error {
	var rep struct {
		Findings []struct {
			Where string `json:"where"`
			What  string `json:"what"`
		} `json:"findings"`
		Repaired *struct {
			Objects int      `json:"objects"`
			Slabs   int      `json:"slabs"`
			Words   int      `json:"words"`
			Left    []string `json:"left"`
		} `json:"repaired"`
	}
	if _, err := r.quarry(ctx, &rep, "fsck", "--repair", "--fabric", "tcp"); err != nil {
		return fmt.Errorf("%w (repaired: %+v; found: %+v)", err, rep.Repaired, rep.Findings)
	}
	if rep.Repaired != nil {
		r.cfg.Say("%s: fsck repaired %d objects, %d free slabs, %d words", r.target, rep.Repaired.Objects, rep.Repaired.Slabs, rep.Repaired.Words)
	}
	return nil
}
