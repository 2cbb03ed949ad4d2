package testcluster_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// BenchmarkRecover is how long a node with a durable region of 2 GiB, with -rebuild-objects in it (0: as many as it has room for), takes
// from its start until a client reads an object: with the file in the page cache, and without.
func BenchmarkRecover(b *testing.B) {
	if fs, err := host.FileSystemOf(b.TempDir()); err != nil || fs.Volatile != nil {
		b.Skipf("folders of tests do not survive a loss of power: %v %v", err, fs.Volatile)
	}
	c := testcluster.New(b, testcluster.Options{Dir: true, RegionBytes: 2 << 30, Capacity: 2 << 30, Log: testing.Verbose()})
	cfg := client.Config{Durability: client.Durable, Transport: client.TransportSHM}
	fill := c.Connect(cfg)
	const writers, batch = 4, 64
	var refs []client.Ref
	var mu sync.Mutex // of refs
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			payloads := slices.Repeat([][]byte{make([]byte, 1024)}, batch)
			for i := w * batch; (i < *rebuildObjects || *rebuildObjects == 0) && !b.Failed(); i += writers * batch {
				made, errs := fill.AllocMany(b.Context(), payloads, client.AllocOptions{WriteOnce: true})
				full := *rebuildObjects == 0 && errors.Is(errors.Join(errs...), client.ErrNoSpace)
				for _, err := range errs {
					if err != nil && !full {
						b.Error(err)
					}
				}
				if full {
					return
				}
				mu.Lock()
				refs = append(refs, made...)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	require.NotEmpty(b, refs)
	require.NoError(b, fill.Close())
	for name, cached := range map[string]bool{"cached": true, "cold": false} {
		b.Run(name, func(b *testing.B) {
			var started, read time.Duration
			for b.Loop() {
				require.NoError(b, c.Nodes[0].Close())
				b.StopTimer()
				if !cached {
					forgetPages(b, c.Dir(0))
				}
				b.StartTimer()
				began := time.Now()
				c.RestartNode(0)
				started += time.Since(began)
				c.WaitInSync(1)
				cl := c.Connect(cfg)
				_, err := cl.Read(b.Context(), refs[len(refs)/2], nil)
				read += time.Since(began)
				require.NoError(b, err)
				require.NoError(b, cl.Close())
			}
			b.ReportMetric(float64(len(refs)), "objects")
			b.ReportMetric(started.Seconds()/float64(b.N), "s-start")
			b.ReportMetric(read.Seconds()/float64(b.N), "s-read")
		})
	}
}

// forgetPages has the kernel drop the pages of the files of a folder.
func forgetPages(b *testing.B, dir string) {
	names, err := filepath.Glob(filepath.Join(dir, "region-*"))
	require.NoError(b, err)
	require.NotEmpty(b, names)
	for _, name := range names {
		f, err := os.Open(name)
		require.NoError(b, err)
		require.NoError(b, f.Sync())
		require.NoError(b, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
		require.NoError(b, f.Close())
	}
}
