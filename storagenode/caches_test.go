package storagenode_test

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/storagenode"
)

func (c *lane) flush(off uint64) error {
	var r rdma.Round
	r.Chain(&c.to).Flush(rdma.Persistent, off, 8)
	rdma.Do(&r)
	return r.Err()
}

// reopen serves a region that was found, and connects to it.
func (b *boss) reopen(agent, address string, region uint32, epoch uint64) *lane {
	a := b.agentAt(agent)
	must := b.hostReq(1, region)
	must.MustExist = true
	require.Zero(b.t, call(b.t, a.HostRegion, must))
	require.Zero(b.t, call(b.t, a.OpenRegion, &quarrypb.OpenRegionRequest{Region: region, Epoch: epoch, ControllerTerm: 1}))
	l, err := b.dial(tcp.Dialer{}, address, 1, uint32(epoch), region, epoch)
	require.NoError(b.t, err)
	return l
}

func running(dir string) string { return filepath.Join(dir, "node.running") }

// A disk fails to write a page, and the node's process is killed, before or after the node has seen the error, and started again. The page cache has what the
// disk has not, and the kernel would take it for written. The new process serves what the disk has, and what it flushes reaches the disk.
func TestHazard282_KilledNodeReadsItsDiskAgain(t *testing.T) {
	d := newDisk(t)
	b := newBoss(t)
	p := b.spawn(t, d.dir)
	a := b.agentAt(p.stats.Agent)
	require.Zero(t, call(t, a.HostRegion, b.hostReq(1, 1)))
	require.Zero(t, call(t, a.OpenRegion, &quarrypb.OpenRegionRequest{Region: 1, Epoch: 1, ControllerTerm: 1}))
	l, err := b.dial(tcp.Dialer{}, p.stats.TCP, 1, 1, 1, 1)
	require.NoError(t, err)
	const fails, beside = dataOff, dataOff + 8192
	for _, off := range []uint64{fails, beside} {
		require.NoError(t, l.write(off, 0x11))
		require.NoError(t, l.flush(off))
	}
	d.fail(regionFile(d.dir, 1), int(fails/4096))
	require.NoError(t, l.write(fails, 0x22))
	require.Error(t, l.flush(fails))
	eventually(t, "the reason is kept", func() bool {
		text, err := os.ReadFile(running(d.dir))
		return err == nil && bytes.Contains(text, []byte("region 1: nothing is flushed after an error of the disk"))
	})
	require.Error(t, p.end(syscall.SIGKILL))
	d.mend()

	p = b.spawn(t, d.dir)
	l = b.reopen(p.stats.Agent, p.stats.TCP, 1, 2)
	for _, off := range []uint64{fails, beside} {
		got, err := l.read(off, 8)
		require.NoError(t, err)
		require.Equal(t, bytes.Repeat([]byte{0x11}, 8), got, "what was flushed is there, and nothing that was not")
	}
	require.NoError(t, l.write(fails, 0x33))
	require.NoError(t, l.flush(fails))
	require.Equal(t, byte(0x33), d.onDisk()[0])
	require.NoError(t, p.end(syscall.SIGTERM))
	require.NoFileExists(t, running(d.dir), "it has ended in good order")
}

// stale maps a region's file of a node that has ended, and has the page at off hold 0x22, which the disk did not take and the kernel forgot: the
// disk has what it had. The page stays cached until the memory is unmapped.
func (d *disk) stale(path string, off int64) []byte {
	t := d.t
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	mem, err := unix.Mmap(int(f.Fd()), off, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	d.fail(path, int(off/4096))
	mem[0] = 0x22
	require.Error(t, unix.Msync(mem, unix.MS_SYNC))
	for tries := 0; f.Sync() != nil; tries++ {
		require.Less(t, tries, 100)
	}
	d.mend()
	return mem
}

// stored is a folder on a disk that can fail, whose node has stored 0x5a durably in so many regions and has ended in good order. word is
// what its node.running said.
func stored(t *testing.T, regions uint32) (d *disk, b *boss, word []byte) {
	d, b = newDisk(t), newBoss(t)
	n := b.startAs(1, d.dir)
	for region := range regions {
		b.hostAndOpen(n, region+1, 1)
		l, err := b.dial(tcp.Dialer{}, n.Stats().TCP, 1, region, region+1, 1)
		require.NoError(t, err)
		require.NoError(t, l.write(dataOff, 0x5a))
		require.NoError(t, l.flush(dataOff))
	}
	word, err := os.ReadFile(running(d.dir))
	require.NoError(t, err)
	require.NoError(t, n.Close())
	require.NoFileExists(t, running(d.dir))
	return d, b, word
}

// A file of which pages stay cached that are not as the disk has them is refused with the remedy. The other regions of the node are served, and the file
// is as it was.
func TestHazard282_CacheThatStays(t *testing.T) {
	d, b, word := stored(t, 2)
	dir := d.dir
	mem := d.stale(regionFile(dir, 1), dataOff)
	require.NoError(t, os.WriteFile(running(dir), word, 0o600)) // as if it had been killed

	storagenode.ShortPatience(t)
	var log bytes.Buffer
	cfg := b.config(dir)
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	n := b.start(cfg)
	last := b.registrations()[len(b.registrations())-1]
	require.Equal(t, []uint32{1}, last.Node.MissingRegions)
	require.Len(t, last.Found, 1)
	l := b.reopen(n.Stats().Agent, n.Stats().TCP, 2, 2)
	got, err := l.read(dataOff, 1)
	require.NoError(t, err)
	require.Equal(t, byte(0x5a), got[0])
	require.NoError(t, n.Close())
	require.Contains(t, log.String(), "region-00000001.quarry: the page cache may have pages of it that the disk has not, and 1 pages stay there")
	require.Contains(t, log.String(), "restart the host")
	require.FileExists(t, running(dir), "a clean end does not make that file good")

	require.NoError(t, unix.Munmap(mem))
	n = b.start(b.config(dir))
	last = b.registrations()[len(b.registrations())-1]
	require.Len(t, last.Found, 2)
	l = b.reopen(n.Stats().Agent, n.Stats().TCP, 1, 2)
	got, err = l.read(dataOff, 1)
	require.NoError(t, err)
	require.Equal(t, byte(0x5a), got[0])
}

// Another process, such as a reader over shm that is stopped or a backup, keeps pages of a healthy file cached: a node that was killed serves it again.
func TestHazard285_HealthyFileThatOthersMap(t *testing.T) {
	d, b, word := stored(t, 1)
	require.NoError(t, os.WriteFile(running(d.dir), word, 0o600)) // as if it had been killed
	f, err := os.Open(regionFile(d.dir, 1))
	require.NoError(t, err)
	defer f.Close()
	mem, err := unix.Mmap(int(f.Fd()), dataOff, 4096, unix.PROT_READ, unix.MAP_SHARED)
	require.NoError(t, err)
	defer unix.Munmap(mem)
	require.Equal(t, byte(0x5a), mem[0])
	storagenode.ShortPatience(t)
	n := b.start(b.config(d.dir))
	require.Len(t, b.registrations()[1].Found, 1)
	require.NoError(t, n.Close())
	require.NoFileExists(t, running(d.dir))
}

// A file whose stale page stays does not take the time in which another file's page goes.
func TestHazard287_EachFileHasItsPatience(t *testing.T) {
	d, b, word := stored(t, 2)
	stays := d.stale(regionFile(d.dir, 1), dataOff)
	defer unix.Munmap(stays)
	goes := d.stale(regionFile(d.dir, 2), dataOff)
	f, err := os.Open(regionFile(d.dir, 2))
	require.NoError(t, err)
	defer f.Close()
	const end = proto.MinRegionBytes - 4096
	cached := func() bool { // the file's last page, which nobody maps
		var st unix.Cachestat_t
		if err := unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{Off: end, Len: 4096}, &st, 0); err != nil {
			t.Skipf("cachestat needs Linux 6.5: %v", err)
		}
		return st.Cache > 0
	}
	_, err = f.ReadAt(make([]byte, 1), end)
	require.NoError(t, err)
	require.True(t, cached())
	require.NoError(t, os.WriteFile(running(d.dir), word, 0o600)) // as if it had been killed

	over := make(chan error, 1)
	go func() { // the other process goes when the node has looked at the file twice: one look drops pages twice at most
		for range 3 {
			for cached() && t.Context().Err() == nil {
				time.Sleep(time.Millisecond)
			}
			f.ReadAt(make([]byte, 1), end)
		}
		over <- unix.Munmap(goes)
	}()
	storagenode.Patience(t, 8*time.Second)
	n := b.start(b.config(d.dir))
	last := b.registrations()[len(b.registrations())-1]
	require.Equal(t, []uint32{1}, last.Node.MissingRegions)
	require.Len(t, last.Found, 1)
	require.NoError(t, <-over)
	require.NoError(t, n.Close())
}

// The kernel reports a write-back error once. The start that receives the report fails because of another file. The next start must distrust the cache too.
func TestHazard286_StartThatFailsBehindAnError(t *testing.T) {
	d, b, _ := stored(t, 1)
	path, bad := regionFile(d.dir, 1), regionFile(d.dir, 2)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	mem, err := unix.Mmap(int(f.Fd()), dataOff, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	require.NoError(t, err)
	d.fail(path, dataOff/4096)
	mem[0] = 0x22
	unix.Sync() // nobody is told
	d.mend()
	require.NoError(t, os.WriteFile(bad, []byte("no region"), 0o600))
	require.NoFileExists(t, running(d.dir), "it has ended in good order")

	storagenode.ShortPatience(t)
	_, err = storagenode.Start(t.Context(), b.config(d.dir))
	require.ErrorContains(t, err, "region-00000002.quarry")
	require.NoError(t, os.Remove(bad))
	require.NoError(t, unix.Munmap(mem))
	n := b.start(b.config(d.dir))
	l := b.reopen(n.Stats().Agent, n.Stats().TCP, 1, 2)
	got, err := l.read(dataOff, 1)
	require.NoError(t, err)
	require.Equal(t, byte(0x5a), got[0])
}

// A controller that orders a new replica gets one in the place of a refused file.
func TestReplicaInPlaceOfARefusedFile(t *testing.T) {
	d := newDisk(t)
	dir := d.dir
	b := newBoss(t)
	n := b.startAs(1, dir)
	b.hostAndOpen(n, 1, 1)
	word, err := os.ReadFile(running(dir))
	require.NoError(t, err)
	require.NoError(t, n.Close())
	mem := d.stale(regionFile(dir, 1), 0)
	require.NoError(t, os.WriteFile(running(dir), word, 0o600))
	storagenode.ShortPatience(t)
	n = b.start(b.config(dir))
	require.Empty(t, b.registrations()[1].Found)
	req := b.hostReq(1, 1)
	req.Uuid = append(make([]byte, 15), 9)
	require.Zero(t, call(t, b.agent(n).HostRegion, req))
	require.NoError(t, n.Close())
	require.NoFileExists(t, running(dir))
	require.NoError(t, unix.Munmap(mem))
}

// After a boot, or a clean end, the page cache is what the disk has: it is kept. What is not understood counts as no clean end.
func TestCachesThatAreTrusted(t *testing.T) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	require.NoError(t, err)
	this := string(bytes.TrimSpace(boot))
	for text, want := range map[string]string{
		"quarry running 1\n0-0-0-0-0\n":                           "",
		"quarry running 1\n" + this + "\n":                        "not ended in good order",
		"quarry running 1\n" + this + "\nregion 1: disk broken\n": "region 1: disk broken",
		"quarry running 2\n0-0-0-0-0\n":                           "not understood",
		"":                                                        "not understood",
	} {
		other := t.TempDir()
		require.NoError(t, os.WriteFile(running(other), []byte(text), 0o600))
		why, err := storagenode.Distrust(other, this)
		require.NoError(t, err)
		if want == "" {
			require.NoError(t, why)
		} else {
			require.ErrorContains(t, why, want)
		}
	}
	why, err := storagenode.Distrust(t.TempDir(), this)
	require.NoError(t, err)
	require.NoError(t, why)
}
