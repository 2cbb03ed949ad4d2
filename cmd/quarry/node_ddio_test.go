package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestSwitchOfThisHost reads and sets the switch of a root port in a tree of files, without a controller.
func TestSwitchOfThisHost(t *testing.T) {
	root := t.TempDir()
	device := func(bus, name, id string) string {
		port := filepath.Join(root, "sys/devices/pci0000:"+bus+"/0000:"+bus+":00.0")
		class := filepath.Join(root, "sys/class/infiniband", name)
		require.NoError(t, os.MkdirAll(filepath.Join(port, "0000:99:00.0"), 0o700))
		require.NoError(t, os.MkdirAll(class, 0o700))
		require.NoError(t, os.Symlink(filepath.Join(port, "0000:99:00.0"), filepath.Join(class, "device")))
		config := make([]byte, 4096)
		config[0x180] = 0x80
		for file, b := range map[string][]byte{"vendor": []byte("0x8086\n"), "device": []byte(id + "\n"), "config": config} {
			require.NoError(t, os.WriteFile(filepath.Join(port, file), b, 0o600))
		}
		return filepath.Join(port, "config")
	}
	run := func(args ...string) result {
		return quarry(t, []string{"QUARRY_CONTROLLER=http://127.0.0.1:1"}, "", append([]string{"node", "ddio", "--root", root}, args...)...)
	}
	config := device("17", "mlx5_0", "0x2030")
	run("--off").ok(t)
	var got map[string]string
	run("--adapter", "mlx5_0", "--json").decode(t, &got)
	require.Equal(t, map[string]string{"adapter": "mlx5_0", "root_port": "0000:17:00.0", "ddio": "off"}, got)
	b, err := os.ReadFile(config)
	require.NoError(t, err)
	require.Equal(t, []byte{0, 1}, []byte{b[0x180], b[0x185]})
	require.Contains(t, run("--adapter", "mlx5_0", "--on").ok(t), "whose DDIO is on")

	device("18", "mlx5_1", "0x347a")
	run("--off").fails(t, exitUsage, "2 RDMA devices", "--adapter")
	run("--adapter", "mlx5_1", "--off").fails(t, 1, "8086:347a", "no root port whose DDIO switch is known")
	run("--adapter", "mlx5_2").fails(t, 1, "no root port")
	run("--adapter", "../x", "--on").fails(t, exitUsage, "name of an RDMA device")
	run("--on", "--off").fails(t, exitUsage, "--on", "--off")
	run("n1", "--adapter", "mlx5_0").fails(t, exitUsage, "on the node's host")
}
