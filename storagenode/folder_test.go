package storagenode_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/storagenode"
	"github.com/quarrystore/quarry/storagenode/state"
)

func regionFile(dir string, n int) string {
	return filepath.Join(dir, fmt.Sprintf("region-%08d.quarry", n))
}

// snapshot is what a folder holds: names, sizes, how contents begin, times of change.
func snapshot(t *testing.T, dir string) string {
	var b strings.Builder
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, e := range entries {
		st, err := e.Info()
		require.NoError(t, err)
		sum := []byte(nil)
		if st.Mode().IsRegular() {
			f, err := os.Open(filepath.Join(dir, e.Name()))
			require.NoError(t, err)
			content, err := io.ReadAll(io.LimitReader(f, 64<<10))
			require.NoError(t, errors.Join(err, f.Close()))
			h := sha256.Sum256(content)
			sum = h[:4]
		}
		at := st.ModTime()
		if strings.HasPrefix(e.Name(), "region-") {
			at = time.Time{} // reserving blocks, also ones that are there, is a modification
		}
		fmt.Fprintf(&b, "%s %v %d %x %v\n", e.Name(), st.Mode(), st.Size(), sum, at)
	}
	return b.String()
}

// rewriteHeader changes a region file's header and updates its checksum.
func rewriteHeader(t *testing.T, path string, change func(*proto.RegionHeader)) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	head := make([]byte, proto.RegionHeaderBytes)
	_, err = f.ReadAt(head, 0)
	require.NoError(t, err)
	h, err := proto.DecodeRegionHeader(head)
	require.NoError(t, err)
	change(&h)
	_, err = f.WriteAt(h.Encode(), 0)
	require.NoError(t, err)
}

func poke(t *testing.T, path string, off int64, b ...byte) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteAt(b, off)
	require.NoError(t, err)
}

func copyFile(t *testing.T, from, to string) {
	b, err := os.ReadFile(from)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(to, b, 0o600))
}

// TestBadFoldersAreRefusedUntouched: whatever is wrong with a folder is said in one
// line that names the file, and nothing in it is changed.
func TestBadFoldersAreRefusedUntouched(t *testing.T) {
	for _, c := range []struct {
		name   string
		want   []string
		damage func(t *testing.T, dir string)
	}{
		{"garbage", []string{"region-00000001.quarry", "wrong magic", "restore it or remove it"}, func(t *testing.T, dir string) {
			poke(t, regionFile(dir, 1), 0, []byte("garbage!")...)
		}},
		{"zeroed header", []string{"region-00000001.quarry", "wrong magic"}, func(t *testing.T, dir string) {
			poke(t, regionFile(dir, 1), 0, make([]byte, proto.RegionHeaderBytes)...)
		}},
		{"flipped bit", []string{"region-00000001.quarry", "checksum is wrong"}, func(t *testing.T, dir string) {
			poke(t, regionFile(dir, 1), 60, 1)
		}},
		{"earlier layout", []string{"region-00000001.quarry", "layout of another version: 1, this build reads 2", "quarry kv dump", "quarry kv load"}, func(t *testing.T, dir string) {
			poke(t, regionFile(dir, 1), 8, 1)
		}},
		{"of the last build of layout 1", []string{"region-00000001.quarry", "layout of another version: 1, this build reads 2", "quarry kv dump", "quarry kv load"}, func(t *testing.T, dir string) {
			head, err := os.ReadFile("testdata/layout1-header.bin")
			require.NoError(t, err)
			poke(t, regionFile(dir, 1), 0, head...)
		}},
		{"empty", []string{"region-00000001.quarry", "0 bytes", "truncated"}, func(t *testing.T, dir string) {
			require.NoError(t, os.Truncate(regionFile(dir, 1), 0))
		}},
		{"truncated header", []string{"region-00000001.quarry", "100 bytes", "truncated"}, func(t *testing.T, dir string) {
			require.NoError(t, os.Truncate(regionFile(dir, 1), 100))
		}},
		{"truncated", []string{"region-00000001.quarry", "16777215 bytes, its header says 16777216"}, func(t *testing.T, dir string) {
			require.NoError(t, os.Truncate(regionFile(dir, 1), proto.MinRegionBytes-1))
		}},
		{"grown", []string{"region-00000001.quarry", "overlong"}, func(t *testing.T, dir string) {
			require.NoError(t, os.Truncate(regionFile(dir, 1), proto.MinRegionBytes+4096))
		}},
		{"another cluster's", []string{"region-00000002.quarry", "belongs to cluster 0102", "move one of them elsewhere"}, func(t *testing.T, dir string) {
			rewriteHeader(t, regionFile(dir, 2), func(h *proto.RegionHeader) { h.Cluster = [16]byte{1, 2} })
		}},
		{"two clusters, no state", []string{"region-00000001.quarry", "region-00000002.quarry", "belongs to cluster"}, func(t *testing.T, dir string) {
			rewriteHeader(t, regionFile(dir, 2), func(h *proto.RegionHeader) { h.Cluster = [16]byte{1, 2} })
			require.NoError(t, os.Remove(filepath.Join(dir, "node.state")))
		}},
		{"two files for one region", []string{"region 1 is in two files", "region-00000001.quarry", "region-7.quarry"}, func(t *testing.T, dir string) {
			copyFile(t, regionFile(dir, 1), filepath.Join(dir, "region-7.quarry"))
		}},
		{"wrong name", []string{"region-00000009.quarry holds region 1", "rename it region-00000001.quarry"}, func(t *testing.T, dir string) {
			require.NoError(t, os.Rename(regionFile(dir, 1), regionFile(dir, 9)))
		}},
		{"folder in its place", []string{"region-00000003.quarry is not a regular file"}, func(t *testing.T, dir string) {
			require.NoError(t, os.Mkdir(regionFile(dir, 3), 0o700))
		}},
		{"another domain", []string{"region-00000001.quarry", "domain adapter"}, func(t *testing.T, dir string) {
			rewriteHeader(t, regionFile(dir, 1), func(h *proto.RegionHeader) { h.Domain = proto.DomainAdapter })
		}},
		{"garbage list", []string{"regions.list", "checksum is wrong", "remove it if all region files are there"}, func(t *testing.T, dir string) {
			require.NoError(t, os.WriteFile(filepath.Join(dir, "regions.list"), []byte("quarry regions 1\n1 00\n"), 0o600))
		}},
		{"flipped list", []string{"regions.list", "checksum is wrong"}, func(t *testing.T, dir string) {
			poke(t, filepath.Join(dir, "regions.list"), 17, '7')
		}},
		{"empty list", []string{"regions.list", "checksum is wrong"}, func(t *testing.T, dir string) {
			require.NoError(t, os.Truncate(filepath.Join(dir, "regions.list"), 0))
		}},
		{"huge list", []string{"regions.list", "more than"}, func(t *testing.T, dir string) {
			require.NoError(t, os.Truncate(filepath.Join(dir, "regions.list"), 1<<20))
		}},
		{"garbage state", []string{"node.state", "not the state of a quarry node"}, func(t *testing.T, dir string) {
			require.NoError(t, os.WriteFile(filepath.Join(dir, "node.state"), []byte("what is this"), 0o600))
		}},
		{"flipped state", []string{"node.state", "checksum is wrong"}, func(t *testing.T, dir string) {
			poke(t, filepath.Join(dir, "node.state"), 32, 77)
		}},
		{"huge state", []string{"node.state", "not the state"}, func(t *testing.T, dir string) {
			require.NoError(t, os.Truncate(filepath.Join(dir, "node.state"), 1<<30))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBoss(t)
			dir := t.TempDir()
			n := b.start(b.config(dir))
			b.hostAndOpen(n, 1, 1)
			b.hostAndOpen(n, 2, 1)
			require.NoError(t, n.Close())
			c.damage(t, dir)
			huge := c.name == "huge state" // 1 GiB of nothing: its size says enough
			var before string
			if !huge {
				before = snapshot(t, dir)
			}
			_, err := storagenode.Start(t.Context(), b.config(dir))
			require.Error(t, err)
			for _, w := range c.want {
				require.ErrorContains(t, err, w)
			}
			require.NotContains(t, err.Error(), "\n")
			if !huge {
				require.Equal(t, before, snapshot(t, dir))
			}
			require.Len(t, b.registrations(), 1, "no controller was told")
		})
	}
}

func TestFilesOfAnotherClusterAreNotTakenOver(t *testing.T) {
	b := newBoss(t)
	dir := t.TempDir()
	n := b.start(b.config(dir))
	b.hostAndOpen(n, 1, 1)
	require.NoError(t, n.Close())
	other := newBoss(t)
	before := snapshot(t, dir)
	_, err := storagenode.Start(t.Context(), other.config(dir))
	require.ErrorContains(t, err, "the node belongs to cluster")
	require.Equal(t, before, snapshot(t, dir))
}

func TestRestartReportsFilesAndServesNone(t *testing.T) {
	b := newBoss(t)
	dir := t.TempDir()
	n := b.start(b.config(dir))
	b.hostAndOpen(n, 1, 1)
	b.hostAndOpen(n, 2, 7)
	c, err := b.dial(tcp.Dialer{}, n.Stats().TCP, 1, 0, 2, 7)
	require.NoError(t, err)
	require.NoError(t, c.write(dataOff, 0x5a))
	require.NoError(t, n.Close())
	// What a crash in the middle of making a region leaves is cleared away.
	require.NoError(t, os.WriteFile(regionFile(dir, 3)+".new", []byte("half"), 0o600))

	n = b.start(b.config(dir))
	require.NoFileExists(t, regionFile(dir, 3)+".new")
	require.Len(t, b.registrations(), 2)
	found := b.registrations()[1].Found
	require.Len(t, found, 2)
	require.Equal(t, b.cluster[:], b.registrations()[1].Cluster)
	require.Equal(t, uint32(2), found[1].Region)
	require.Equal(t, uint64(7), found[1].Epoch)
	require.Equal(t, uint64(proto.MinRegionBytes), found[1].SizeBytes)
	require.NotEqual(t, b.registrations()[0].Node.Incarnation, b.registrations()[1].Node.Incarnation)
	for epoch := range uint64(10) {
		_, err := b.dial(tcp.Dialer{}, n.Stats().TCP, 1, 0, 2, epoch)
		require.Error(t, err)
	}
	must := b.hostReq(1, 2)
	must.MustExist = true
	require.Zero(t, call(t, b.agent(n).HostRegion, must))
	require.Zero(t, call(t, b.agent(n).OpenRegion, &quarrypb.OpenRegionRequest{Region: 2, Epoch: 8, ControllerTerm: 1}))
	c, err = b.dial(tcp.Dialer{}, n.Stats().TCP, 1, 0, 2, 8)
	require.NoError(t, err)
	got, err := c.read(dataOff, 8)
	require.NoError(t, err)
	require.Equal(t, byte(0x5a), got[0])
	// Closed under 9, and known to be so in the next incarnation.
	require.Zero(t, call(t, b.agent(n).CloseRegion, &quarrypb.CloseRegionRequest{Region: 2, Epoch: 9, ControllerTerm: 1}))
	require.Zero(t, call(t, b.agent(n).DropRegion, &quarrypb.DropRegionRequest{Region: 1, Epoch: 1, ControllerTerm: 1}))
	require.NoFileExists(t, regionFile(dir, 1))
	require.NoError(t, n.Close())
	b.start(b.config(dir))
	require.Len(t, b.registrations()[2].Found, 1)
	require.Equal(t, uint64(9), b.registrations()[2].Found[0].Epoch)
	kept, err := os.ReadFile(filepath.Join(dir, "node.state"))
	require.NoError(t, err)
	k, err := state.DecodeKept(kept)
	require.NoError(t, err)
	require.Equal(t, uint64(1), k.Term)
}

// A node that comes back with some of its region files says which are gone, serves none of them, and serves the rest as it was. What the
// controllers have been told once is not told again; files that are put back are found; a folder of an earlier version misses nothing.
func TestComesBackWithHalfItsFiles(t *testing.T) {
	b := newBoss(t)
	dir := t.TempDir()
	n := b.start(b.config(dir))
	for region := uint32(1); region <= 4; region++ {
		b.hostAndOpen(n, region, 1)
	}
	c, err := b.dial(tcp.Dialer{}, n.Stats().TCP, 1, 0, 2, 1)
	require.NoError(t, err)
	require.NoError(t, c.write(dataOff, 0x5a))
	require.Zero(t, call(t, b.agent(n).DropRegion, &quarrypb.DropRegionRequest{Region: 4, Epoch: 1, ControllerTerm: 1}))
	require.NoError(t, n.Close())
	aside := t.TempDir()
	for _, region := range []int{1, 3} {
		require.NoError(t, os.Rename(regionFile(dir, region), regionFile(aside, region)))
	}
	// The place of one is taken by another region of the same number, such as of an older copy of the folder.
	copyFile(t, regionFile(aside, 3), regionFile(dir, 3))
	rewriteHeader(t, regionFile(dir, 3), func(h *proto.RegionHeader) { h.UUID = [16]byte{0xee} })

	var log bytes.Buffer
	cfg := b.config(dir)
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	n = b.start(cfg)
	last := b.registrations()[len(b.registrations())-1]
	require.Equal(t, []uint32{1, 3}, last.Node.MissingRegions, "not the one that was dropped")
	require.Len(t, last.Found, 2)
	require.Equal(t, uint32(2), last.Found[0].Region)
	require.Equal(t, append([]byte{0xee}, make([]byte, 15)...), last.Found[1].Uuid, "as what it is")
	require.NoFileExists(t, regionFile(dir, 1), "nothing is made in its place")
	for _, region := range []uint32{1, 3} {
		must := b.hostReq(1, region)
		must.MustExist = true
		require.NotZero(t, call(t, b.agent(n).HostRegion, must), "region %d", region)
		_, err := b.dial(tcp.Dialer{}, n.Stats().TCP, 1, 0, region, 2)
		require.Error(t, err)
	}
	require.NoFileExists(t, regionFile(dir, 1))
	must := b.hostReq(1, 2)
	must.MustExist = true
	require.Zero(t, call(t, b.agent(n).HostRegion, must))
	require.Zero(t, call(t, b.agent(n).OpenRegion, &quarrypb.OpenRegionRequest{Region: 2, Epoch: 2, ControllerTerm: 1}))
	c, err = b.dial(tcp.Dialer{}, n.Stats().TCP, 1, 0, 2, 2)
	require.NoError(t, err)
	got, err := c.read(dataOff, 8)
	require.NoError(t, err)
	require.Equal(t, byte(0x5a), got[0])
	require.NoError(t, n.Close())
	require.Contains(t, log.String(), `missing="[1 3]" found=2`)

	for _, region := range []int{1, 3} {
		require.NoError(t, os.Rename(regionFile(aside, region), regionFile(dir, region)))
	}
	require.NoError(t, os.Remove(filepath.Join(dir, "regions.list")))
	n = b.start(b.config(dir))
	last = b.registrations()[len(b.registrations())-1]
	require.Empty(t, last.Node.MissingRegions)
	require.Len(t, last.Found, 3)
	require.NoError(t, n.Close())
	require.NoError(t, os.Remove(regionFile(dir, 3)))
	for _, want := range [][]uint32{{3}, nil} { // known from the registration on, not from a region that is made
		n = b.start(b.config(dir))
		last = b.registrations()[len(b.registrations())-1]
		require.Equal(t, want, last.Node.MissingRegions)
		require.NoError(t, n.Close())
	}
}

func TestAFolderBelongsToOneNode(t *testing.T) {
	b := newBoss(t)
	dir := t.TempDir()
	n := b.start(b.config(dir))
	second := b.config(dir)
	second.Name = "n2"
	_, err := storagenode.Start(t.Context(), second)
	require.ErrorContains(t, err, dir)
	require.ErrorContains(t, err, "in use by another storage node")
	// So it is for another process.
	cmd := exec.Command(os.Args[0], dir)
	cmd.Env = append(os.Environ(), asNode+"="+b.url)
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "in use by another storage node")
	require.NoError(t, n.Close())
	b.start(second)
}

// TestFilesStayLockedWhileAClientOfADeadNodeHasThem: a client on shm outlives its
// node by a moment, in which it can still write. The next incarnation waits for its end.
func TestFilesStayLockedWhileAClientOfADeadNodeHasThem(t *testing.T) {
	b := newBoss(t)
	dir := t.TempDir()
	p := b.spawn(t, dir)
	a := b.agentAt(p.stats.Agent)
	require.Zero(t, call(t, a.HostRegion, b.hostReq(1, 1)))
	require.Zero(t, call(t, a.OpenRegion, &quarrypb.OpenRegionRequest{Region: 1, Epoch: 1, ControllerTerm: 1}))
	c, err := b.dial(shm.NewDialer(), p.stats.Socket, 1, 0, 1, 1)
	require.NoError(t, err)
	require.NoError(t, c.write(dataOff, 0x77))
	require.Error(t, p.end(syscall.SIGKILL))
	n := b.start(b.config(dir))
	require.Error(t, c.write(dataOff, 0x78), "it has let go")
	require.Zero(t, call(t, b.agent(n).OpenRegion, &quarrypb.OpenRegionRequest{Region: 1, Epoch: 2, ControllerTerm: 1}))
	c, err = b.dial(tcp.Dialer{}, n.Stats().TCP, 1, 0, 1, 2)
	require.NoError(t, err)
	got, err := c.read(dataOff, 8)
	require.NoError(t, err)
	require.Equal(t, byte(0x77), got[0])
}

func TestALockedFileIsWaitedForButNotForEver(t *testing.T) {
	b := newBoss(t)
	dir := t.TempDir()
	n := b.start(b.config(dir))
	b.hostAndOpen(n, 1, 1)
	require.NoError(t, n.Close())
	f, err := os.Open(regionFile(dir, 1))
	require.NoError(t, err)
	require.NoError(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = storagenode.Start(ctx, b.config(dir))
	require.ErrorContains(t, err, "region-00000001.quarry is mapped by another storage node, or by a client of one that died")
	time.AfterFunc(100*time.Millisecond, func() { f.Close() })
	b.start(b.config(dir))
}
