package rxevm

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestKernelPackagesAreGenericOnes(t *testing.T) {
	require.Equal(t, map[string]string{
		"6.1.0-56-amd64":         "linux-image-6.1.0-56-amd64",
		"6.12.117+deb12-amd64":   "linux-image-6.12.117+deb12-amd64",
		"6.12.115+deb12-amd64":   "linux-image-6.12.115+deb12-amd64-unsigned",
		"7.0.3+deb14-amd64":      "linux-image-7.0.3+deb14-amd64",
		"6.12.9+deb13+1.2-amd64": "linux-image-6.12.9+deb13+1.2-amd64",
	}, kernelPackages(`linux-image-6.1.0-56-amd64 linux-image-6.1.0-56-amd64-dbg
		linux-image-6.1.0-56-cloud-amd64 linux-image-6.1.0-56-rt-amd64-unsigned
		linux-image-6.12.117+deb12-amd64-unsigned
		linux-image-6.12.117+deb12-amd64
		linux-image-6.1.0-56-amd64-unsigned
		linux-image-6.12.115+deb12-amd64-unsigned
		linux-image-7.0.3+deb14-amd64 linux-image-6.12.9+deb13+1.2-amd64
		linux-image-amd64 linux-image-6.12-amd64 linux-image-amd64-signed-template linux-image-6.1.0-56-arm64`))
}

func TestVersionsCompareByNumber(t *testing.T) {
	versions := []string{"6.12.9+deb12-amd64", "6.1.0-56-amd64", "6.12.117+deb12-amd64", "6.1.0-9-amd64"}
	slices.SortFunc(versions, compareVersions)
	require.Equal(t, []string{"6.1.0-9-amd64", "6.1.0-56-amd64", "6.12.9+deb12-amd64", "6.12.117+deb12-amd64"}, versions)
}

func TestCachedKernelIsTheNewestWholeOne(t *testing.T) {
	cache := t.TempDir()
	add := func(version string, names ...string) {
		for _, n := range names {
			n = filepath.Join(cache, version, n)
			require.NoError(t, os.MkdirAll(filepath.Dir(n), 0o755))
			require.NoError(t, os.WriteFile(n, nil, 0o644))
		}
	}
	_, ok := cachedKernel(cache, "")
	require.False(t, ok)

	add("6.1.0-9-amd64", "boot/vmlinuz-6.1.0-9-amd64", "lib/modules/6.1.0-9-amd64/modules.dep")
	add("6.1.0-56-amd64", "boot/vmlinuz-6.1.0-56-amd64", "usr/lib/modules/6.1.0-56-amd64/modules.dep")
	add("6.12.1-amd64", "boot/vmlinuz-6.12.1-amd64")               // depmod has not run
	add("6.12.2-amd64", "lib/modules/6.12.2-amd64/modules.dep")    // no kernel
	add("unpack-1", "boot/vmlinuz-9.9.9-amd64", "lib/modules.dep") // half unpacked
	require.NoError(t, os.WriteFile(filepath.Join(cache, "lock"), nil, 0o644))
	k, ok := cachedKernel(cache, "")
	require.True(t, ok)
	require.Equal(t, "6.1.0-56-amd64", k.version)

	k, ok = cachedKernel(cache, "6.1.0-9-amd64")
	require.True(t, ok)
	require.Equal(t, "6.1.0-9-amd64", k.version)
	_, ok = cachedKernel(cache, "6.12.1-amd64")
	require.False(t, ok)
}
