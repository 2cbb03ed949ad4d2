package rxevm

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// sysfs makes files below a directory that looks like /sys/class/infiniband.
func sysfs(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, content := range files {
		name = filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
		require.NoError(t, os.WriteFile(name, []byte(content+"\n"), 0o644))
	}
	return dir
}

func TestNativeDevice(t *testing.T) {
	_, ok := nativeDevice(sysfs(t, nil))
	require.False(t, ok)
	_, ok = nativeDevice(sysfs(t, map[string]string{"mlx5_0/ports/1/state": "1: DOWN"}))
	require.False(t, ok)

	dev, ok := nativeDevice(sysfs(t, map[string]string{"mlx4_0/ports/1/state": "4: ACTIVE"}))
	require.True(t, ok)
	require.Equal(t, hostDevice{name: "mlx4_0"}, dev)

	dev, ok = nativeDevice(sysfs(t, map[string]string{
		"ib0/ports/1/state":                 "4: ACTIVE",
		"mlx5_0/ports/1/state":              "4: ACTIVE",
		"mlx5_0/ports/1/gids/0":             "fe80:0000:0000:0000:0000:0000:0000:0001",
		"mlx5_0/ports/1/gid_attrs/types/0":  "RoCE v2",
		"mlx5_0/ports/1/gids/2":             "0000:0000:0000:0000:0000:ffff:c0a8:0105",
		"mlx5_0/ports/1/gid_attrs/types/2":  "IB/RoCE v1",
		"mlx5_0/ports/1/gids/30":            "0000:0000:0000:0000:0000:ffff:c0a8:0105",
		"mlx5_0/ports/1/gid_attrs/types/30": "RoCE v2",
	}))
	require.True(t, ok)
	require.Equal(t, hostDevice{name: "mlx5_0", address: "192.168.1.5", gidIndex: "30"}, dev)
}

func TestRunNative(t *testing.T) {
	var out, errs bytes.Buffer
	outDir := filepath.Join(t.TempDir(), "made")
	j, err := Job{
		Command: []string{"/bin/sh", "-c", `echo $RXE_DEVICE $RXE_SELF $RXE_PEER $RXE_GID_INDEX $RXE_ROLE; : >$RXE_OUT/f; exit 7`},
		OutDir:  outDir, Stdout: &out, Stderr: &errs,
	}.withDefaults()
	require.NoError(t, err)
	r, err := runNative(t.Context(), j, hostDevice{"mlx5_0", "192.168.1.5", "3"})
	require.NoError(t, err)
	require.Equal(t, Result{Code: 7, Where: "host device mlx5_0"}, r)
	require.Equal(t, "mlx5_0 192.168.1.5 192.168.1.5 3 both\n", out.String())
	require.Contains(t, errs.String(), "this host has RDMA device mlx5_0")
	require.FileExists(t, filepath.Join(outDir, "f"))

	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	j.Command = []string{"sleep", "60"}
	_, err = runNative(ctx, j, hostDevice{name: "mlx5_0"})
	require.ErrorIs(t, err, context.DeadlineExceeded)

	j.Command = []string{"/no/such/command"}
	_, err = runNative(t.Context(), j, hostDevice{name: "mlx5_0"})
	require.ErrorIs(t, err, os.ErrNotExist)
}
