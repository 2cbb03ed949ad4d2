package doctor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// durable says whether regions in the data folder survive a loss of power, and whether an
// adapter may be let into them.
func (h Host) durable(p Plan) (out []Finding) {
	const check = "data folder"
	if p.DataDir == "" {
		return nil
	}
	if pmem.IsDevice(p.DataDir) {
		dev, err := pmem.OpenDevice(p.DataDir)
		switch {
		case errors.Is(err, unix.EWOULDBLOCK):
			return []Finding{ok(check, "%s: device DAX, in use by a storage node", p.DataDir)}
		case err != nil:
			return []Finding{found(check, Error, "give /dev/daxN.M, or a folder", "%v", err)}
		}
		defer dev.File.Close()
		if dev.Unlisted {
			return []Finding{found(check, Warning, "if it does survive: quarry storage --medium persistent", "%s: device DAX of %s: durable regions are refused, for the kernel lists no NVDIMM behind it: it may be memory that loses its content with the power", p.DataDir, size(dev.Bytes))}
		}
		return []Finding{ok(check, "%s: device DAX of %s, aligned to %s: regions survive a loss of power", p.DataDir, size(dev.Bytes), size(dev.Align))}
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
