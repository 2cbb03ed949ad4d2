package rxevm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// kernel is an unpacked kernel package. It is not installed, so the host's boot loader and
// initramfs hooks do not run.
type kernel struct {
	version string // 6.12.117+deb12-amd64
	vmlinuz string
	modules string // directory that holds modules.dep
}

// kernelPackage matches the generic flavour only: cloud kernels have no rdma_rxe, and rt
// kernels schedule differently. The three numbers exclude the meta packages.
var kernelPackage = regexp.MustCompile(`^linux-image-(\d+\.\d+\.\d+[^ ]*-amd64)(-unsigned)?$`)

// kernelPackages reads `apt-cache pkgnames` and returns package names by
// kernel version; of a signed and an unsigned one it keeps the signed.
func kernelPackages(pkgnames string) map[string]string {
	found := map[string]string{}
	for name := range strings.FieldsSeq(pkgnames) {
		m := kernelPackage.FindStringSubmatch(name)
		if m == nil || strings.Contains(name, "-cloud-") || strings.Contains(name, "-rt-") {
			continue
		}
		if m[2] == "" || found[m[1]] == "" {
			found[m[1]] = name
		}
	}
	return found
}

var digits = regexp.MustCompile(`\d+`)

// compareVersions orders kernel versions by their numbers, left to right.
func compareVersions(a, b string) int {
	numbers := func(v string) (n []int) {
		for _, d := range digits.FindAllString(v, -1) {
			i, _ := strconv.Atoi(d)
			n = append(n, i)
		}
		return n
	}
	return cmp.Or(slices.Compare(numbers(a), numbers(b)), strings.Compare(a, b))
}

// findKernel returns the given version or, if that is empty, the newest one of the first
// place that has any: the cache, the archive, the host.
func findKernel(ctx context.Context, cache, version string, log io.Writer) (kernel, error) {
	if k, ok := cachedKernel(cache, version); ok {
		return k, nil
	}
	k, err := downloadKernel(ctx, cache, version, log)
	if err == nil || ctx.Err() != nil {
		return k, err
	}
	if host, ok := hostKernel(version); ok {
		fmt.Fprintf(log, "rxevm: %v; using the host's own kernel %s\n", err, host.version)
		return host, nil
	}
	return kernel{}, err
}

func kernelAt(dir, version string) (kernel, bool) {
	k := kernel{version: version, vmlinuz: filepath.Join(dir, "boot", "vmlinuz-"+version)}
	// /lib is a link to usr/lib on a host, and either in a package.
	for _, lib := range []string{"lib", "usr/lib"} {
		k.modules = filepath.Join(dir, lib, "modules", version)
		if file(filepath.Join(k.modules, "modules.dep"))() && readable(k.vmlinuz) {
			return k, true
		}
	}
	return kernel{}, false
}

func readable(name string) bool {
	f, err := os.Open(name)
	if err != nil {
		return false
	}
	f.Close()
	return true
}

func cachedKernel(cache, version string) (kernel, bool) {
	if version != "" {
		return kernelAt(filepath.Join(cache, version), version)
	}
	entries, _ := os.ReadDir(cache)
	var best kernel
	for _, e := range entries {
		if k, ok := kernelAt(filepath.Join(cache, e.Name()), e.Name()); ok &&
			(best.version == "" || compareVersions(k.version, best.version) > 0) {
			best = k
		}
	}
	return best, best.version != ""
}

func hostKernel(version string) (kernel, bool) {
	entries, _ := os.ReadDir("/lib/modules")
	var best kernel
	for _, e := range entries {
		k, ok := kernelAt("/", e.Name())
		if !ok || (version != "" && version != k.version) {
			continue
		}
		if _, _, err := k.loadOrder(); err != nil {
			continue
		}
		if best.version == "" || compareVersions(k.version, best.version) > 0 {
			best = k
		}
	}
	return best, best.version != ""
}

// downloadKernel downloads a kernel and unpacks it into cache/version. The directory appears
// by a rename, complete. Preconditions: the caller holds the cache lock.
func downloadKernel(ctx context.Context, cache, version string, log io.Writer) (kernel, error) {
	list := func() map[string]string {
		out, _ := exec.CommandContext(ctx, "apt-cache", "pkgnames", "linux-image-").Output()
		return kernelPackages(string(out))
	}
	packages := list()
	if len(packages) == 0 && os.Geteuid() == 0 && apt(ctx, "", "update") == nil {
		packages = list()
	}
	wanted := version
	if wanted == "" && len(packages) != 0 {
		var all []string
		for v := range packages {
			all = append(all, v)
		}
		wanted = slices.MaxFunc(all, compareVersions)
	}
	pkg := packages[wanted]
	if pkg == "" {
		return kernel{}, &MissingError{"a kernel package with rdma_rxe " + version, "none in apt's lists; run as root: apt-get update"}
	}

	tmp, err := os.MkdirTemp(cache, "unpack-")
	if err != nil {
		return kernel{}, err
	}
	defer os.RemoveAll(tmp)
	// Accessible to all users, because apt downloads as a user of its own and warns otherwise.
	if err := os.Chmod(tmp, 0o755); err != nil {
		return kernel{}, err
	}
	fmt.Fprintf(log, "rxevm: downloading %s (about 100 MB, once)\n", pkg)
	if err := apt(ctx, tmp, "download", pkg); err != nil {
		return kernel{}, &MissingError{"kernel package " + pkg, err.Error()}
	}
	debs, _ := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if len(debs) != 1 {
		return kernel{}, fmt.Errorf("apt-get download %s left %d files", pkg, len(debs))
	}
	tree := filepath.Join(tmp, "tree")
	if err := command(ctx, "dpkg", "-x", debs[0], tree); err != nil {
		return kernel{}, err
	}
	// depmod reads lib/modules; a package that already ships usr/lib gets the link.
	if !file(filepath.Join(tree, "lib"))() {
		if err := os.Symlink("usr/lib", filepath.Join(tree, "lib")); err != nil {
			return kernel{}, err
		}
	}
	if err := command(ctx, lookTool("depmod"), "-b", tree, wanted); err != nil {
		return kernel{}, err
	}
	k, ok := kernelAt(tree, wanted)
	if !ok {
		return kernel{}, &MissingError{"vmlinuz or modules in " + pkg, "name another kernel version"}
	}
	if _, _, err := k.loadOrder(); err != nil {
		return kernel{}, &MissingError{"a module in " + pkg, err.Error()}
	}
	final := filepath.Join(cache, wanted)
	if err := os.RemoveAll(final); err != nil {
		return kernel{}, err
	}
	if err := os.Rename(tree, final); err != nil {
		return kernel{}, err
	}
	k, _ = kernelAt(final, wanted)
	return k, nil
}

func command(ctx context.Context, name string, args ...string) error {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// loadOrder returns the guest's module files in load order, relative to
// k.modules, and those that NVDIMMs need besides.
func (k kernel) loadOrder() (order, pmem []string, err error) {
	f, err := os.Open(filepath.Join(k.modules, "modules.dep"))
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	dep, err := parseModulesDep(f)
	if err != nil {
		return nil, nil, err
	}
	b, err := os.Open(filepath.Join(k.modules, "modules.builtin"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, nil, err
	}
	builtin := map[string]bool{}
	if err == nil {
		defer b.Close()
		if builtin, err = parseModulesBuiltin(b); err != nil {
			return nil, nil, err
		}
	}
	if order, err = loadOrder(guestModules, dep, builtin); err != nil {
		return nil, nil, err
	}
	all, err := loadOrder(slices.Concat(guestModules, pmemModules), dep, builtin)
	if err != nil {
		return nil, nil, err
	}
	return order, all[len(order):], nil
}
