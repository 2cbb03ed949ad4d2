package pmem

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
)

// Domains: what a loss of power leaves of stores to a region of NVDIMMs, as the kernel names them.
const (
	DomainCaches     = "cpu_cache"         // all visible stores: eADR
	DomainController = "memory_controller" // what has left the caches: ADR
	DomainUnknown    = "unknown"           // the kernel does not say: treated as memory_controller
)

// Sysfs is where the kernel's files are; a test gives another folder.
type Sysfs string

// System is the kernel's own.
const System Sysfs = "/sys"

var regionName = regexp.MustCompile(`^region[0-9]+$`)

// region is the folder of the NVDIMM region that a device lies in; "" if in none that is known. A region of a CXL root has
// the same name, and its memory may be ordinary: the bus tells them apart. class is block or char.
func (s Sysfs) region(class string, dev uint64) string {
	at, err := filepath.EvalSymlinks(filepath.Join(string(s), "dev", class, fmt.Sprintf("%d:%d", unix.Major(dev), unix.Minor(dev))))
	for ; err == nil && at != "/" && at != "."; at = filepath.Dir(at) {
		if !regionName.MatchString(filepath.Base(at)) {
			continue
		}
		if bus, err := filepath.EvalSymlinks(filepath.Join(at, "subsystem")); err == nil && filepath.Base(bus) == "nd" {
			return at
		}
	}
	return ""
}

// domain is what a region's persistence_domain says.
func domain(region string) string {
	b, err := os.ReadFile(filepath.Join(region, "persistence_domain"))
	if d := strings.TrimSpace(string(b)); region != "" && err == nil && d != "" {
		return d
	}
	return DomainUnknown
}

// cachesSurvive says whether a loss of power keeps the processors' caches: only if there are regions, and every one
// says so. A store's way to one region may pass the same caches as to another.
func (s Sysfs) cachesSurvive() bool {
	entries, err := os.ReadDir(filepath.Join(string(s), "bus/nd/devices"))
	regions := 0
	for _, e := range entries {
		if !regionName.MatchString(e.Name()) {
			continue
		}
		regions++
		if domain(filepath.Join(string(s), "bus/nd/devices", e.Name())) != DomainCaches {
			return false
		}
	}
	return err == nil && regions > 0
}

// deepFlush empties the buffers of a region's memory controller to the medium, where the kernel offers it: then
// the data survive even a failure of the energy that empties them in a loss of power. Nothing is done
// where it is not offered, or not to this user.
func deepFlush(region string) error {
	if region == "" {
		return nil
	}
	at := filepath.Join(region, "deep_flush")
	b, err := os.ReadFile(at)
	if err != nil || strings.TrimSpace(string(b)) != "1" {
		return nil // not offered
	}
	err = os.WriteFile(at, []byte("1"), 0)
	if err != nil && !errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("deep flush of %s: %w", filepath.Base(region), err)
	}
	return nil
}
