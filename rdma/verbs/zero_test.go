//go:build cgo && verbs

package verbs

import (
	"bytes"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
)

// After a region is closed, zeroed and opened again, the adapter and the processor see
// the same memory: the adapter reads zeros, and each sees what the other writes.
func TestZeroedRegionIsOneMemory(t *testing.T) {
	hugePages(t, 16)
	for name, memory := range map[string]func(t *testing.T) (*host.Memory, error){
		"anonymous":  func(*testing.T) (*host.Memory, error) { return host.NewMemory("test", rdmatest.RegionBytes) },
		"tmpfs file": tmpfsMemory,
		"huge pages": func(*testing.T) (*host.Memory, error) {
			return host.NewHugeMemory("test", rdmatest.RegionBytes, 2<<20)
		},
	} {
		for use, w := range map[string]Windows{"windows": WindowsOn, "memory regions": WindowsOff} {
			t.Run(name+", "+use, func(t *testing.T) {
				n := startNodeWith(t, testCluster, w)
				m, err := memory(t)
				require.NoError(t, err)
				n.memories[1] = m
				require.NoError(t, n.OpenRegion(t.Context(), 1, 1))
				c, to := open(t, newDialer(t), n.addr, ticket(1, 0, rdma.ReadWrite), 0)
				for epoch := uint64(1); epoch < 4; epoch++ {
					old := bytes.Repeat([]byte{byte(epoch)}, 4096)
					for _, at := range []uint64{0, 8192, rdmatest.RegionBytes - 4096} {
						require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.Write(at, old) }).Err)
						require.Equal(t, old, m.Bytes()[at:][:4096], "the processor sees what the adapter writes")
					}
					require.NoError(t, n.CloseRegion(t.Context(), 1, epoch))
					require.NoError(t, m.Zero(8192))
					require.Equal(t, old, m.Bytes()[:4096], "below the offset nothing changes")
					require.NoError(t, n.OpenRegion(t.Context(), 1, epoch+1))
					to.Window, err = c.Open(t.Context(), 1, epoch+1)
					require.NoError(t, err)
					for _, at := range []uint64{8192, rdmatest.RegionBytes - 4096} {
						got := bytes.Clone(old)
						require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.Read(at, got) }).Err)
						require.True(t, bytes.Equal(make([]byte, 4096), got), "the adapter reads bytes from before the zeroing at %d", at)
						require.True(t, bytes.Equal(make([]byte, 4096), m.Bytes()[at:][:4096]), "the processor reads bytes from before the zeroing at %d", at)
						copy(m.Bytes()[at:], "by the processor")
						require.NoError(t, chain(to, guard, func(c *rdma.Chain) { c.Read(at, got[:16]) }).Err)
						require.Equal(t, "by the processor", string(got[:16]), "the adapter sees what the processor writes")
					}
				}
			})
		}
	}
}

func tmpfsMemory(t *testing.T) (*host.Memory, error) {
	dir := t.TempDir()
	mountTmpfs(t, dir)
	return host.OpenMemory(filepath.Join(dir, "region"), rdmatest.RegionBytes, true)
}
