package verbs

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// Counters are read from where the kernel shows them, of the port asked for.
func TestReadPort(t *testing.T) {
	root := t.TempDir()
	for name, text := range map[string]string{
		"1/state": "4: ACTIVE\n", "1/counters/port_xmit_data": "17\n", "1/hw_counters/out_of_sequence": "3\n",
		"1/hw_counters/lifespan": "10\n", "1/counters/odd": "N/A (not available)\n",
		"2/state": "1: DOWN\n", "2/counters/port_xmit_data": "99\n", "1/rate": "2.5 Gb/sec (1X SDR)\n", "2/rate": "fast\n",
	} {
		p := filepath.Join(root, "sys/class/infiniband/mlx5_0/ports", name)
		require.NoError(t, os.MkdirAll(filepath.Dir(p), 0o755))
		require.NoError(t, os.WriteFile(p, []byte(text), 0o644))
	}
	require.Equal(t, Port{Active: true, Counters: map[string]uint64{"port_xmit_data": 17, "out_of_sequence": 3}}, ReadPort(root, "mlx5_0", 1))
	require.Equal(t, Port{Counters: map[string]uint64{"port_xmit_data": 99}}, ReadPort(root, "mlx5_0", 2))
	require.False(t, ReadPort(root, "mlx5_9", 1).Active)
	require.Equal(t, uint32(2500), Megabits(root, "mlx5_0", 1))
	require.Zero(t, Megabits(root, "mlx5_0", 2))
	require.Zero(t, Megabits(root, "mlx5_0", 3))
}
