package doctor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/quarrystore/quarry/rdma/host"
)

// durable says whether regions in the data folder survive a loss of power, and whether an
// adapter may be let into them.
func (h Host) durable(p Plan) (out []Finding) {
	const check = "data folder"
	if p.DataDir == "" {
		return nil
	}
	dir := p.DataDir
	fs, err := host.FileSystemOf(dir)
	for errors.Is(err, os.ErrNotExist) && filepath.Dir(dir) != dir {
		dir = filepath.Dir(dir) // not made yet
		fs, err = host.FileSystemOf(dir)
	}
	switch {
	case err != nil:
		return []Finding{found(check, Error, "make it, or name another with --data", "%s: %v", p.DataDir, err)}
	case fs.Volatile != nil && fs.Unpinnable == nil:
		out = append(out, found(check, Info, "for durable regions: a folder on "+strings.Join(host.Flushing(), ", "), "%s: regions do not survive a loss of power: %v", p.DataDir, fs.Volatile))
	case fs.Volatile != nil:
		out = append(out, found(check, Warning, "mount a volume on it: "+strings.Join(host.Flushing(), ", ")+", or tmpfs for regions that need not survive", "%s: durable regions are refused: %v", p.DataDir, fs.Volatile))
	default:
		out = append(out, ok(check, "%s: regions on %s survive a loss of power", p.DataDir, fs.Name))
	}
	if fs.Unpinnable != nil && (p.RDMA || len(h.adapters()) > 0) {
		level := Info
		if p.RDMA {
			level = Error
		}
		out = append(out, found(check, level, "keep regions in memory (no --data), on tmpfs or on huge pages; or serve tcp and shm (--fabric tcp)", "%s: %v", p.DataDir, fs.Unpinnable))
	}
	return out
}
