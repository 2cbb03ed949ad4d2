package shm

import (
	"os"
	"sync"

	"github.com/quarrystore/quarry/rdma/host/pmem"
	"golang.org/x/sys/unix"
)

// distrusted has the mappings of this process that a flush has failed of, and that are not mapped any more. Lanes end behind a failed flush; mapped
// again, the pages that the kernel could not write would count as written.
var distrusted failures

// failures are Flushers that fail, by their mappings. There are not more than region files of which a flush has failed while the process runs.
type failures struct {
	mu sync.Mutex // guards by
	by map[identity]pmem.Flusher
}

// note remembers a mapping that ends, if a flush of it has failed.
func (d *failures) note(id identity, f pmem.Flusher) {
	if f.Failed() == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.by == nil {
		d.by = make(map[identity]pmem.Flusher)
	}
	d.by[id] = f
}

// instead is the Flusher of a new mapping: the one that has failed, if there is one, else f.
func (d *failures) instead(id identity, f pmem.Flusher) pmem.Flusher {
	d.mu.Lock()
	defer d.mu.Unlock()
	if failed, known := d.by[id]; known {
		f.Forget()
		return failed
	}
	return f
}

// born is when a file was made, in ns; 0 if its file system does not say.
func born(f *os.File) int64 {
	var st unix.Statx_t
	if unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_BTIME, &st) != nil || st.Mask&unix.STATX_BTIME == 0 {
		return 0
	}
	return st.Btime.Sec*1e9 + int64(st.Btime.Nsec)
}
