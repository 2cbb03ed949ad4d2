package storagenode

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// The kernel takes pages that it could not write for written, and keeps their content in its cache for as long as the host runs. A process that
// starts on the same boot would read, and flush, what the disk does not have. A node therefore says in a file of its folder on which boot it uses the cached
// files, before anything is stored in them, and removes that file when it ends in good order and nothing has failed. A node that finds it, with
// the id of this boot, drops the cache of every region file before it maps any. Nothing has to be written when the disk fails, or when the node is killed.
const (
	runningName  = "node.running"
	runningTitle = "quarry running 1"
	// maxRunningBytes of that file.
	maxRunningBytes = 4096
)

// caches is what a folder knows of the page cache of its region files.
type caches struct {
	used    bool             // the kernel caches their pages: msync flushes them
	entered bool             // the folder's file of this boot is ours
	checked bool             // checkCaches has come to its end
	refused map[string]error // files that are not mapped, by their paths
}

// errUnclean: the node before this one has not ended in good order on this boot.
var errUnclean = errors.New("the process that had this folder before has not ended in good order")

// runningText is the folder's file: a line for the title, the boot and why flushes fail, if that could be written.
func runningText(boot, why string) []byte {
	b := fmt.Appendf(nil, "%s\n%s\n", runningTitle, boot)
	if why != "" {
		b = append(b, strings.ReplaceAll(why, "\n", " ")[:min(len(why), maxRunningBytes/2)]+"\n"...)
	}
	return b
}

func (d *folder) runningPath() string { return filepath.Join(d.dir, runningName) }

// distrust is why the page cache may not be as the disk is; nil: it is. A file that is not understood says as much as one of this boot.
func (d *folder) distrust() (why, err error) {
	f, err := os.Open(d.runningPath())
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("data folder: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRunningBytes))
	if err != nil {
		return nil, fmt.Errorf("data folder: %w", err)
	}
	lines := strings.Split(string(bytes.TrimSuffix(b, []byte("\n"))), "\n")
	switch {
	case len(lines) < 2 || lines[0] != runningTitle:
		return fmt.Errorf("%s is not understood", d.runningPath()), nil
	case lines[1] != d.boot:
		return nil, nil
	case len(lines) > 2:
		return fmt.Errorf("%w: %s", errUnclean, lines[2]), nil
	}
	return errUnclean, nil
}

// checkCaches has every region file read as the disk has it, before any is mapped. A file of which that cannot be said is refused, and the others are
// served: the controllers treat its replica as one whose file is missing. A file that is locked stops the node, as in open.
func (d *folder) checkCaches(ctx context.Context) error {
	p, _, err := d.persistence()
	if err != nil {
		return fmt.Errorf("data folder %s: %w", d.dir, err)
	}
	if d.caches.used = p.Flush == pmem.Msync.String() && !pmem.UsesLedgers(); !d.caches.used {
		return nil
	}
	why, err := d.distrust()
	if err != nil {
		return err
	}
	if why == nil { // the kernel tells of an error once: what is found here is not to be forgotten by a start that fails behind it
		if err := d.enterCaches(); err != nil {
			return err
		}
	}
	paths, err := d.regionPaths()
	if err != nil {
		return err
	}
	d.caches.refused = map[string]error{}
	patience := lockPatience
	for _, p := range paths {
		if st, err := os.Stat(p); err != nil || !st.Mode().IsRegular() {
			continue // open has the error
		}
		switch err := host.CheckCache(ctx, p, why != nil, patience); {
		case errors.Is(err, host.ErrCached):
			d.caches.refused[p] = err
			d.log.Error("storage node: this region is not served", "error", err)
			patience = max(patience/2, lockPatience/16) // each file has some: what keeps the pages of one need not keep the others
		case err != nil:
			return err
		}
	}
	d.caches.checked = true
	if why != nil {
		d.log.Warn("storage node: region files are read from the disk again", "data", d.dir, "files", len(paths), "reason", why)
	}
	return nil
}

// enterCaches says in the folder that region files are used on this boot. Preconditions: nothing has been stored in them yet.
func (d *folder) enterCaches() error {
	if !d.caches.used {
		return nil
	}
	b := runningText(d.boot, strings.Join(d.refusals(), "; "))
	if err := d.replace(d.runningPath(), b, uint64(len(b))); err != nil {
		return fmt.Errorf("data folder: %w", err)
	}
	d.caches.entered = true
	return nil
}

// refusals are the errors of files that are not mapped.
func (d *folder) refusals() (texts []string) {
	for _, p := range slices.Sorted(maps.Keys(d.caches.refused)) {
		texts = append(texts, d.caches.refused[p].Error())
	}
	return texts
}

// note adds why flushes fail to the folder's file. Without it the next node drops the caches as well, and does not know why.
func (d *folder) note(why string) {
	d.log.Error("storage node: the disk fails: the next process on this boot reads the region files from it again", "data", d.dir, "error", why)
	if !d.caches.entered {
		return
	}
	b := runningText(d.boot, why)
	if err := d.replace(d.runningPath(), b, uint64(len(b))); err != nil {
		d.log.Error("storage node: the reason could not be kept", "data", d.dir, "error", err)
	}
}

// giveUpRefused removes a refused file whose place a new replica takes, by order of a controller: another replica has what it had.
func (d *folder) giveUpRefused(path string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.caches.refused[path] == nil {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("region file: %w", err)
	}
	delete(d.caches.refused, path)
	return nil
}

// leaveCaches removes the folder's file if the page cache can be relied on. After an error of that, the next node drops the caches.
func (d *folder) leaveCaches(clean bool) {
	if d.caches.entered && d.caches.checked && clean && len(d.caches.refused) == 0 {
		_ = os.Remove(d.runningPath())
	}
}
