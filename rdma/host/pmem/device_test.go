package pmem

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// dax makes a device DAX below a folder, and is its number. old: as before Linux 5.10.
func (s fake) dax(parent string, minor int, size, align string, old bool) uint64 {
	at := fmt.Sprintf("%s/dax%d.0", parent, minor)
	s.write(at+"/size", size)
	if old {
		s.write("devices/parent"+fmt.Sprint(minor)+"/align", align)
		s.link(at+"/device", "devices/parent"+fmt.Sprint(minor))
	} else {
		s.write(at+"/align", align)
	}
	s.write("bus/dax/uevent", "")
	s.link(at+"/subsystem", "bus/dax")
	s.link(fmt.Sprintf("dev/char/252:%d", minor), at)
	return unix.Mkdev(252, uint32(minor))
}

// Size and alignment come from sysfs, by the device's number; what is no device DAX is refused.
func TestDeviceInSysfs(t *testing.T) {
	s := newFake(t)
	sys := Sysfs(s.root)
	open := func() *os.File {
		f, err := os.Create(filepath.Join(t.TempDir(), "dax0.0"))
		require.NoError(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	s.write("bus/nd/uevent", "")
	s.link("devices/ndbus0/region0/subsystem", "bus/nd")
	dax := func(minor int, size, align string, old bool) uint64 {
		return s.dax("devices/ndbus0/region0", minor, size, align, old)
	}
	for _, old := range []bool{false, true} {
		minor := 0
		if old {
			minor = 1
		}
		d, err := sys.device(open(), dax(minor, "264241152\n", "2097152\n", old))
		require.NoError(t, err)
		require.EqualValues(t, 264241152, d.Bytes)
		require.EqualValues(t, 2097152, d.Align)
		require.False(t, d.Unlisted)
		require.Equal(t, "region0", filepath.Base(sys.region("char", unix.Mkdev(252, uint32(minor)))))
	}
	for i, bad := range [][2]string{{"x", "4096"}, {"8192", "512"}, {"8192", "12288"}, {"6144", "4096"}} {
		_, err := sys.device(open(), dax(10+i, bad[0], bad[1], false))
		require.Error(t, err, "%v", bad)
	}
	s.write("class/mem/uevent", "")
	s.link("devices/virtual/null/subsystem", "class/mem")
	s.link("dev/char/1:3", "devices/virtual/null")
	_, err := sys.device(open(), unix.Mkdev(1, 3))
	require.ErrorContains(t, err, "is not device DAX")

	f := open()
	_, err = sys.device(f, unix.Mkdev(252, 0))
	require.NoError(t, err)
	again, err := os.OpenFile(f.Name(), os.O_RDWR, 0)
	require.NoError(t, err)
	defer again.Close()
	_, err = sys.device(again, unix.Mkdev(252, 0))
	require.ErrorContains(t, err, "in use by another storage node")
}

// Device DAX is also how the kernel hands out ordinary memory: what firmware has set aside, and volatile memory behind CXL, whose regions have
// the names of NVDIMM regions. No device but that of an NVDIMM counts as listed, and its caches count as lost although all NVDIMMs of the machine keep theirs.
func TestHazard220_MemoryThatIsNoNVDIMM(t *testing.T) {
	s := newFake(t)
	sys := Sysfs(s.root)
	s.write("bus/nd/devices/region0/persistence_domain", "cpu_cache\n")
	s.write("bus/cxl/uevent", "")
	s.link("devices/root0/decoder0.0/region0/subsystem", "bus/cxl")
	require.True(t, sys.cachesSurvive())
	for minor, parent := range []string{"devices/platform/hmem.0", "devices/root0/decoder0.0/region0/dax_region0"} {
		f, err := os.Create(filepath.Join(t.TempDir(), "dax0.0"))
		require.NoError(t, err)
		defer f.Close()
		number := s.dax(parent, minor, "264241152\n", "2097152\n", false)
		d, err := sys.device(f, number)
		require.NoError(t, err)
		require.True(t, d.Unlisted, parent)
		require.Empty(t, sys.region("char", number), parent)
	}
	way, err := processor()
	if err != nil || way == Msync {
		t.Skip("this processor has no instruction that writes cache lines back")
	}
	t.Setenv(FlushVariable, "")
	f, err := os.Create(filepath.Join(t.TempDir(), "of no NVDIMM"))
	require.NoError(t, err)
	defer f.Close()
	var m Mapping
	require.NoError(t, sys.direct(f, &m))
	require.Equal(t, Persistence{Kind: KindFSDAX, Domain: DomainUnknown, Flush: way.String()}, m.Persistence())
}

func TestOtherDevicesAreRefused(t *testing.T) {
	_, err := OpenDevice("/dev/null")
	require.ErrorContains(t, err, "/dev/null is not device DAX")
	_, err = OpenDevice(filepath.Join(t.TempDir(), "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
	require.True(t, IsDevice("/dev/null"))
	require.False(t, IsDevice(t.TempDir()))
	require.False(t, IsDevice("/none"))
}

// A namespace that is raw, or in mode fsdax or sector, is a block device: the error names the way to make it device DAX, and nothing
// opens it.
func TestBlockDevicesAreRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pmem0s")
	if err := unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(259, 1<<19))); err != nil {
		t.Skipf("no device can be made here: %v", err)
	}
	_, err := OpenDevice(path)
	require.ErrorContains(t, err, path+" is a block device: its namespace has mode fsdax, sector or raw")
	require.ErrorContains(t, err, "--mode=devdax")
	require.True(t, IsDevice(path))
}

// Where the kernel cannot say what a loss of power keeps, nothing is taken for granted: caches count as lost.
func TestUnreadableDomain(t *testing.T) {
	root := t.TempDir()
	region := filepath.Join(root, "bus/nd/devices/region0")
	require.NoError(t, os.MkdirAll(filepath.Join(region, "persistence_domain"), 0o700)) // reading a folder fails
	require.Equal(t, DomainUnknown, domain(region))
	require.False(t, Sysfs(root).cachesSurvive())
}
