package host

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/quarrystore/quarry/rdma/host/pmem"
	"golang.org/x/sys/unix"
)

const (
	// Pieces of a file that are asked for at a time: much for a disk, little for memory. The least is what every kernel reads by default.
	maxAheadBytes = 8 << 20
	minAheadBytes = 128 << 10
	aheadCheck    = 8 << 20 // how often it is looked whether there is memory
)

// ReadAhead has the kernel read a file on a disk into the page cache, from its beginning on, until ctx ends, and
// counts the bytes that it has asked for. It leaves memory that is short alone, and changes nothing but speed.
func (m *Memory) ReadAhead(ctx context.Context, count *atomic.Uint64) {
	if m.mapping.Kind != pmem.KindFile || m.retain() != nil {
		return
	}
	defer m.release()
	bytes, piece := uint64(len(m.mem)), aheadPiece("/sys", m.file)
	for asked := uint64(0); asked < bytes && ctx.Err() == nil; {
		if asked%aheadCheck < piece && AvailableMemory() < SpareMemory+aheadCheck {
			return
		}
		// By the file: faults, MADV_POPULATE_READ among them, read 128 KiB and wait.
		n := min(piece, bytes-asked)
		if unix.Fadvise(int(m.file.Fd()), int64(asked), int64(n), unix.FADV_WILLNEED) != nil {
			return
		}
		asked += n
		count.Add(n)
	}
}

// aheadPiece is how much of a file may be asked for at a time. The kernel reads the larger of the disk's window for reading ahead and its longest
// request, and leaves the rest of a longer piece out without an error.
func aheadPiece(sysfs string, f *os.File) uint64 {
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil {
		return minAheadBytes
	}
	number := fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	kib := uint64(0)
	for _, at := range []string{
		"/class/bdi/" + number + "/read_ahead_kb",
		"/dev/block/" + number + "/queue/max_sectors_kb",
		"/dev/block/" + number + "/../queue/max_sectors_kb", // of a partition; the kernel follows the link before ..
	} {
		if b, err := os.ReadFile(sysfs + at); err == nil {
			n, _ := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 32)
			kib = max(kib, n)
		}
	}
	if kib == 0 {
		return minAheadBytes
	}
	page := uint64(os.Getpagesize())
	return max(page, min(kib<<10, maxAheadBytes)&^(page-1))
}
