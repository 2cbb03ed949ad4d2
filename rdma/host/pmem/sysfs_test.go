package pmem

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// fake is a sysfs whose files a test writes.
type fake struct {
	t    *testing.T
	root string
}

func newFake(t *testing.T) fake { return fake{t, t.TempDir()} }

func (s fake) write(path, text string) {
	p := filepath.Join(s.root, path)
	require.NoError(s.t, os.MkdirAll(filepath.Dir(p), 0o700))
	require.NoError(s.t, os.WriteFile(p, []byte(text), 0o600))
}

func (s fake) link(from, to string) {
	p := filepath.Join(s.root, from)
	require.NoError(s.t, os.MkdirAll(filepath.Dir(p), 0o700))
	require.NoError(s.t, os.Symlink(filepath.Join(s.root, to), p))
}

// Caches count as safe only where there are regions, and each of them says so; what cannot be read does not.
func TestCachesSurviveOnlyIfEveryRegionSaysSo(t *testing.T) {
	s := newFake(t)
	sys := Sysfs(s.root)
	require.False(t, sys.cachesSurvive(), "no bus")
	s.write("bus/nd/devices/ndbus0/provider", "ACPI")
	require.False(t, sys.cachesSurvive(), "no regions")
	s.write("bus/nd/devices/region0/persistence_domain", "cpu_cache\n")
	require.True(t, sys.cachesSurvive())
	s.write("bus/nd/devices/region1/persistence_domain", "memory_controller\n")
	require.False(t, sys.cachesSurvive(), "one region does not")
	s.write("bus/nd/devices/region1/persistence_domain", "cpu_cache\n")
	require.True(t, sys.cachesSurvive())
	require.NoError(t, os.Remove(filepath.Join(s.root, "bus/nd/devices/region1/persistence_domain")))
	require.False(t, sys.cachesSurvive(), "one does not say")
	require.NoError(t, os.Mkdir(filepath.Join(s.root, "bus/nd/devices/region1/persistence_domain"), 0o700))
	require.False(t, sys.cachesSurvive(), "one cannot be read")
}

// A device's region is the folder above it of that name. The region says its domain, and is flushed where
// it offers that.
func TestRegionOfADevice(t *testing.T) {
	s := newFake(t)
	sys := Sysfs(s.root)
	s.write("devices/ndbus0/region3/persistence_domain", "memory_controller\n")
	s.write("devices/ndbus0/region3/deep_flush", "1\n")
	s.write("devices/ndbus0/region3/pfn3.0/block/pmem3/size", "1")
	s.link("dev/block/259:5", "devices/ndbus0/region3/pfn3.0/block/pmem3")
	s.write("bus/nd/uevent", "")
	s.link("devices/ndbus0/region3/subsystem", "bus/nd")
	s.write("devices/virtual/sda/size", "1")
	s.link("dev/block/8:0", "devices/virtual/sda")
	region := sys.region("block", unix.Mkdev(259, 5))
	require.Equal(t, "region3", filepath.Base(region))
	require.Equal(t, DomainController, domain(region))
	require.NoError(t, deepFlush(region))
	for _, dev := range []uint64{unix.Mkdev(8, 0), unix.Mkdev(99, 9)} {
		region := sys.region("block", dev)
		require.Empty(t, region)
		require.Equal(t, DomainUnknown, domain(region))
		require.NoError(t, deepFlush(region))
	}
	written, err := os.ReadFile(filepath.Join(s.root, "devices/ndbus0/region3/deep_flush"))
	require.NoError(t, err)
	require.Equal(t, "1", string(written), "the kernel's file was written")
	s.write("devices/ndbus0/region3/deep_flush", "0\n")
	require.NoError(t, deepFlush(region))
	written, err = os.ReadFile(filepath.Join(s.root, "devices/ndbus0/region3/deep_flush"))
	require.NoError(t, err)
	require.Equal(t, "0\n", string(written), "not offered, not written")
}

// A mapping that the kernel has granted MAP_SYNC is flushed by lines; by a fence alone where caches survive, unless
// the variable names a way.
func TestDirectMappings(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	require.NoError(t, err)
	defer f.Close()
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(f.Fd()), &st))
	way, err := processor()
	if err != nil || way == Msync {
		t.Skip("this processor has no instruction that writes cache lines back")
	}
	t.Setenv(FlushVariable, "")
	s := newFake(t)
	sys := Sysfs(s.root)
	s.write("devices/region0/persistence_domain", "memory_controller\n")
	s.write("devices/region0/pmem0/size", "1")
	s.link(fmt.Sprintf("dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)), "devices/region0/pmem0")
	s.link("bus/nd/devices/region0", "devices/region0")
	s.link("devices/region0/subsystem", "bus/nd")
	var m Mapping
	require.NoError(t, sys.direct(f, &m))
	require.Equal(t, "line", m.Flusher.Granularity())
	require.Equal(t, Persistence{Kind: KindFSDAX, Domain: DomainController, Flush: way.String()}, m.Persistence())
	s.write("devices/region0/persistence_domain", "cpu_cache\n")
	require.NoError(t, sys.direct(f, &m))
	require.Equal(t, Persistence{Kind: KindFSDAX, Domain: DomainCaches, Flush: "fence"}, m.Persistence())
	require.False(t, m.Flusher.Streams(), "its caches are the medium")
	t.Setenv(FlushVariable, way.String())
	require.NoError(t, sys.direct(f, &m))
	require.Equal(t, "line", m.Flusher.Granularity())
}
