package storagenode

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/quarrystore/quarry/storagenode/state"
	"github.com/zeebo/xxh3"
)

// roster is the list of the regions of a folder, kept in a file of it: a region that it names and that has no file is missing. A
// region is in it after its file is there, and not any more before its file is removed, so that no crash makes one look missing.
type roster map[uint32][16]byte // UUIDs by number

const (
	rosterName  = "regions.list"
	rosterTitle = "quarry regions 1"
	// maxRosterBytes of a file: a line has at most 44 bytes.
	maxRosterBytes = 64 * (state.MaxRegions + 2)
)

// encode is a line for the title, for each region and for the checksum of those before.
func (r roster) encode() []byte {
	var b strings.Builder
	fmt.Fprintln(&b, rosterTitle)
	for _, region := range slices.Sorted(maps.Keys(r)) {
		fmt.Fprintf(&b, "%d %x\n", region, r[region])
	}
	return fmt.Appendf([]byte(b.String()), "%016x\n", xxh3.HashString(b.String()))
}

// decodeRoster reads and checks what encode has written.
func decodeRoster(b []byte) (roster, error) {
	r := roster{}
	text := string(b)
	last := text[strings.LastIndexByte(strings.TrimSuffix(text, "\n"), '\n')+1:]
	head := strings.TrimSuffix(text, last)
	if fmt.Sprintf("%016x\n", xxh3.HashString(head)) != last {
		return nil, errors.New("its checksum is wrong")
	}
	lines := bufio.NewScanner(strings.NewReader(head))
	if !lines.Scan() || lines.Text() != rosterTitle {
		return nil, fmt.Errorf("it begins with %q, this build reads %q", lines.Text(), rosterTitle)
	}
	for lines.Scan() {
		var region uint32
		var text string
		_, err := fmt.Sscanf(lines.Text(), "%d %s", &region, &text)
		uuid, bad := hex.DecodeString(text)
		if err != nil || bad != nil || len(uuid) != 16 {
			return nil, fmt.Errorf("the line %q names no region", lines.Text())
		}
		r[region] = [16]byte(uuid)
	}
	return r, nil
}

func (d *folder) rosterPath() string { return filepath.Join(d.dir, rosterName) }

// readRoster reads the list. A folder of an earlier version has none.
func (d *folder) readRoster() (roster, error) {
	f, err := os.Open(d.rosterPath())
	if errors.Is(err, os.ErrNotExist) {
		return roster{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list of regions: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRosterBytes+1))
	if err == nil && len(b) > maxRosterBytes {
		err = fmt.Errorf("more than %d bytes", maxRosterBytes)
	}
	var r roster
	if err == nil {
		r, err = decodeRoster(b)
	}
	if err != nil {
		return nil, fmt.Errorf("list of regions %s: %w; restore it, or remove it if all region files are there", d.rosterPath(), err)
	}
	return r, nil
}

// enroll changes the list, on disk first.
func (d *folder) enroll(change func(r roster)) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	next := maps.Clone(d.roster)
	if next == nil {
		next = roster{}
	}
	change(next)
	if maps.Equal(next, d.roster) {
		return nil
	}
	b := next.encode()
	if err := d.replace(d.rosterPath(), b, uint64(len(b))); err != nil {
		return fmt.Errorf("list of regions: %w", err)
	}
	d.roster = next
	return nil
}

// compare says which regions of the list are not among those found.
func (r roster) compare(list []found) (missing []uint32) {
	here := map[[16]byte]bool{}
	for _, f := range list {
		here[f.region.UUID] = true
	}
	for _, region := range slices.Sorted(maps.Keys(r)) {
		if !here[r[region]] {
			missing = append(missing, region)
		}
	}
	return missing
}

// settle makes the list that of the regions that are here, once controllers know which are missing.
func (d *folder) settle(here []state.Region) error {
	return d.enroll(func(r roster) {
		clear(r)
		for _, h := range here {
			r[h.Number] = h.UUID
		}
	})
}
