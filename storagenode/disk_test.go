package storagenode_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// disk is a file system on a disk of which single blocks can be made to fail: an image in memory whose block is given to another file.
type disk struct {
	t          *testing.T
	dir        string
	image      string
	filler     string
	block, was int64 // the block that fails, or 0, and how much the filler had before
	kept       []byte
}

const diskMiB = 48

func newDisk(t *testing.T) *disk {
	if os.Geteuid() != 0 {
		t.Skip("mounting a small file system needs root")
	}
	below, dir := t.TempDir(), t.TempDir()
	d := &disk{t: t, dir: dir, image: filepath.Join(below, "image"), filler: filepath.Join(below, "filler")}
	d.run("mount", "-t", "tmpfs", "-o", fmt.Sprintf("size=%dm", diskMiB+1), "none", below)
	t.Cleanup(func() { unix.Unmount(below, unix.MNT_DETACH) })
	require.NoError(t, os.WriteFile(d.image, make([]byte, diskMiB<<20), 0o600)) // every block has its memory
	d.run("mkfs.ext4", "-q", "-b", "4096", "-O", "^has_journal", "-E", "nodiscard", d.image)
	d.run("mount", "-o", "loop", d.image, dir)
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return d
}

func (d *disk) run(command ...string) string {
	out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
	if err != nil {
		d.t.Skipf("no disk that fails can be made here: %v: %v %s", command, err, out)
	}
	return string(out)
}

// fail has writes to the block of a file's page fail from now on. Reads of it do not.
func (d *disk) fail(path string, page int) {
	name, err := filepath.Rel(d.dir, path)
	require.NoError(d.t, err)
	unix.Sync()
	var last string // debugfs says who it is, too
	for line := range strings.Lines(d.run("debugfs", "-R", fmt.Sprintf("bmap %s %d", name, page), d.image)) {
		last = strings.TrimSpace(line)
	}
	d.block, err = strconv.ParseInt(last, 10, 64)
	require.NoError(d.t, err)
	require.NotZero(d.t, d.block)
	d.kept = d.onDisk()
	d.run("fallocate", "--punch-hole", "--offset", fmt.Sprint(d.block*4096), "--length", "4096", d.image)
	f, err := os.Create(d.filler)
	require.NoError(d.t, err)
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	require.ErrorIs(d.t, err, unix.ENOSPC)
}

// mend has the disk take writes again; the block has what it had when it failed.
func (d *disk) mend() {
	require.NoError(d.t, os.Remove(d.filler))
	f, err := os.OpenFile(d.image, os.O_WRONLY, 0)
	require.NoError(d.t, err)
	defer f.Close()
	_, err = f.WriteAt(d.kept, d.block*4096)
	require.NoError(d.t, err)
}

// onDisk is what the disk has in the block.
func (d *disk) onDisk() []byte {
	f, err := os.Open(d.image)
	require.NoError(d.t, err)
	defer f.Close()
	b := make([]byte, 4096)
	_, err = f.ReadAt(b, d.block*4096)
	require.NoError(d.t, err)
	return b
}
