package storagenode

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma/host"
)

// A node switches DDIO as it is asked and puts it back at its end; what it sees decides how clients flush; what it cannot do as it is
// asked keeps it from starting.
func TestSwitchesDDIO(t *testing.T) {
	root := t.TempDir()
	port := filepath.Join(root, "sys/devices/pci0000:17/0000:17:00.0")
	class := filepath.Join(root, "sys/class/infiniband/mlx5_0")
	require.NoError(t, os.MkdirAll(filepath.Join(port, "0000:18:00.0"), 0o700))
	require.NoError(t, os.MkdirAll(class, 0o700))
	require.NoError(t, os.Symlink(filepath.Join(port, "0000:18:00.0"), filepath.Join(class, "device")))
	write := func(name string, b []byte) { require.NoError(t, os.WriteFile(filepath.Join(port, name), b, 0o600)) }
	space := func(control byte) []byte {
		b := make([]byte, 4096)
		b[0x180], b[0x185] = control, 0
		return b
	}
	write("vendor", []byte("0x8086\n"))
	write("device", []byte("0x2030\n"))
	write("config", space(0x80))

	node := func(ddio string) *Node {
		ctx, cancel := context.WithCancel(t.Context())
		return &Node{ctx: ctx, cancel: cancel, cfg: Config{Name: "n1", DDIO: ddio, Logger: slog.New(slog.DiscardHandler)}, adapter: "mlx5_0"}
	}
	keep := node("keep")
	require.NoError(t, keep.switchDDIO(root))
	require.Equal(t, host.DDIOOn, keep.ddio)
	require.NoError(t, keep.close())

	off := node("off")
	require.NoError(t, off.switchDDIO(root))
	require.Equal(t, host.DDIOOff, off.ddio)
	require.NoError(t, off.close())
	b, err := os.ReadFile(filepath.Join(port, "config"))
	require.NoError(t, err)
	require.Equal(t, space(0x80), b, "as it was before the node")

	none := node("off")
	none.adapter = ""
	require.ErrorContains(t, none.switchDDIO(root), "--ddio off: this node serves no RDMA")
	write("device", []byte("0x347a\n"))
	require.ErrorContains(t, node("off").switchDDIO(root), "--ddio off: adapter mlx5_0 is behind 0000:17:00.0, a device 8086:347a")
	require.ErrorContains(t, node("on").switchDDIO(root), "8086:347a")
	unknown := node("")
	require.NoError(t, unknown.switchDDIO(root))
	require.Equal(t, host.DDIOUnknown, unknown.ddio)
}

// NUMA nodes that are no numbers, or that the host does not have, keep the node from starting.
func TestRefusesNUMANodes(t *testing.T) {
	for want, says := range map[string]string{"first": "want auto or the number", "1023": "there is no NUMA node 1023", "-1": "there is no NUMA node -1"} {
		n := &Node{cfg: Config{NUMA: want}}
		err := n.bindNUMA()
		require.ErrorContains(t, err, "--numa "+want)
		require.ErrorContains(t, err, says)
	}
	_, bound := host.BoundNUMA()
	require.False(t, bound)
	auto := &Node{cfg: Config{NUMA: NUMAAuto, Logger: slog.New(slog.DiscardHandler)}}
	require.NoError(t, auto.bindNUMA(), "no adapter: nothing to be near to")
	_, bound = host.BoundNUMA()
	require.False(t, bound)
}
