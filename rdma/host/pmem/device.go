package pmem

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Device is a device DAX character device, such as /dev/dax0.0: persistent memory without a file system. It is
// locked: no other node uses it.
type Device struct {
	File  *os.File
	Path  string
	Bytes uint64
	Align uint64 // mappings begin and end at multiples of it
	// Volatile says that the device's memory does not survive a loss of power, or that nothing of it need: nothing is flushed.
	Volatile bool
	// Unlisted says that the kernel lists no NVDIMM behind the device: it may be ordinary memory that was set aside, or memory
	// behind CXL, of which the kernel does not say whether it survives a loss of power.
	Unlisted bool
}

// IsDevice says whether a path is a device of any kind, and so not a folder.
func IsDevice(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode()&os.ModeDevice != 0
}

// OpenDevice opens and locks a device. It refuses everything that is not device DAX, with the way to make one.
func OpenDevice(path string) (*Device, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("device: %w", err)
	}
	if st.Mode()&os.ModeCharDevice == 0 {
		return nil, fmt.Errorf("%s is a block device: its namespace has mode fsdax, sector or raw; make a file system on one of mode fsdax and mount it with -o dax, or give its memory "+
			"as a device: ndctl create-namespace --force --reconfig=NAMESPACE --mode=devdax", path)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, unix.EBUSY) {
		return nil, fmt.Errorf("%s is in use by the kernel (daxctl reconfigure-device --mode=devdax gives it back): %w", path, err)
	}
	if err != nil {
		return nil, fmt.Errorf("device: %w", err)
	}
	d, err := System.describe(f)
	if err != nil {
		f.Close()
		return nil, err
	}
	return d, nil
}

// describe reads a device's size and alignment, and locks it.
func (s Sysfs) describe(f *os.File) (*Device, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("device %s: %w", f.Name(), err)
	}
	return s.device(f, st.Rdev)
}

// device reads what sysfs says of a device number, and locks the device against other nodes. The
// lock ends with the file.
func (s Sysfs) device(f *os.File, number uint64) (*Device, error) {
	d := &Device{File: f, Path: f.Name()}
	if err := s.measure(d, number); err != nil {
		return nil, err
	}
	d.Unlisted = s.region("char", number) == ""
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("%s is in use by another storage node: give each its own device (%w)", d.Path, err)
	}
	return d, nil
}

// DeviceSize is the size and the alignment of an open device, such as one that a client was sent.
func DeviceSize(f *os.File) (bytes, align uint64, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, 0, fmt.Errorf("device %s: %w", f.Name(), err)
	}
	d := &Device{File: f, Path: f.Name()}
	err = System.measure(d, st.Rdev)
	return d.Bytes, d.Align, err
}

// measure reads a device's size and alignment.
func (s Sysfs) measure(d *Device, number uint64) error {
	at := filepath.Join(string(s), "dev/char", fmt.Sprintf("%d:%d", unix.Major(number), unix.Minor(number)))
	if system, err := filepath.EvalSymlinks(filepath.Join(at, "subsystem")); err != nil || filepath.Base(system) != "dax" {
		return fmt.Errorf("%s is not device DAX: give /dev/daxN.M, a folder, or no --data", d.Path)
	}
	for name, to := range map[string]*uint64{"size": &d.Bytes, "align": &d.Align} {
		b, err := os.ReadFile(filepath.Join(at, name))
		if errors.Is(err, os.ErrNotExist) { // before Linux 5.10 align is the parent's
			b, err = os.ReadFile(filepath.Join(at, "device", name))
		}
		if err == nil {
			*to, err = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
		}
		if err != nil {
			return fmt.Errorf("%s: its %s: %w", d.Path, name, err)
		}
	}
	if page := uint64(os.Getpagesize()); d.Align < page || d.Align&(d.Align-1) != 0 || d.Bytes%d.Align != 0 {
		return fmt.Errorf("%s: %d bytes aligned to %d: want whole units of a power of two from %d on", d.Path, d.Bytes, d.Align, page)
	}
	return nil
}

// Map maps a part of the device. Preconditions: off and bytes are multiples of Align, within the device.
func (d *Device) Map(off, bytes uint64) (Mapping, error) {
	m, err := Map(d.File, int64(off), bytes, unix.PROT_READ|unix.PROT_WRITE, !d.Volatile)
	if err != nil {
		return m, fmt.Errorf("%s: %w", d.Path, err)
	}
	return m, nil
}
