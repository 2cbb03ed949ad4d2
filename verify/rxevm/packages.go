package rxevm

import (
	"bytes"
	"context"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// MissingError says why this machine cannot run the virtual machine. Callers that can do
// without it (tests, make targets) skip and print the error.
type MissingError struct {
	What   string
	Remedy string
}

func (e *MissingError) Error() string { return "missing " + e.What + ": " + e.Remedy }

// need is a Debian package and a check for its contents, which may have been installed in
// another way.
type need struct {
	pkg     string
	present func() bool
	// build: the package is needed to compile the verbs provider, and not to boot.
	build bool
}

// rdma-core itself is not in the list: it would install udev and a new systemd on the host,
// for daemons and rules that Soft-RoCE does not use. The tool `rdma` is in iproute2, the rxe
// provider in ibverbs-providers.
var needs = []need{
	{pkg: "qemu-system-x86", present: tool("qemu-system-x86_64")},
	{pkg: "busybox-static", present: func() bool { return staticBusybox() != "" }},
	{pkg: "kmod", present: tool("depmod")},
	{pkg: "xz-utils", present: tool("xz")},
	{pkg: "iproute2", present: tool("rdma")},
	{pkg: "libibverbs1", present: library("libibverbs.so.1")},
	{pkg: "librdmacm1", present: library("librdmacm.so.1")},
	{pkg: "ibverbs-providers", present: file("/etc/libibverbs.d/rxe.driver")},
	{pkg: "ibverbs-utils", present: tool("ibv_devinfo")},
	{pkg: "perftest", present: tool("ib_read_lat")},
	{pkg: "ndctl", present: tool("ndctl")},
	{pkg: "e2fsprogs", present: tool("mkfs.ext4")},
	{pkg: "gcc", present: tool("gcc"), build: true},
	{pkg: "libc6-dev", present: file("/usr/include/stdlib.h"), build: true},
	{pkg: "libibverbs-dev", present: file("/usr/include/infiniband/verbs.h"), build: true},
	{pkg: "librdmacm-dev", present: file("/usr/include/rdma/rdma_cma.h"), build: true},
}

func tool(name string) func() bool { return func() bool { return lookTool(name) != "" } }

func file(name string) func() bool {
	return func() bool { _, err := os.Stat(name); return err == nil }
}

func library(name string) func() bool {
	return func() bool {
		for _, dir := range []string{"/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"} {
			if file(filepath.Join(dir, name))() {
				return true
			}
		}
		return false
	}
}

// lookTool also looks in directories that are not in the PATH of ordinary users.
func lookTool(name string) string {
	if p, err := exec.LookPath(name); err == nil {
		return p
	}
	for _, dir := range []string{"/usr/sbin", "/sbin", "/usr/local/sbin"} {
		if p, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return p
		}
	}
	return ""
}

// staticBusybox returns the path of a statically linked busybox: the initramfs has no C
// library.
func staticBusybox() string {
	p := lookTool("busybox")
	if p == "" {
		return ""
	}
	f, err := elf.Open(p)
	if err != nil {
		return ""
	}
	defer f.Close()
	for _, prog := range f.Progs {
		if prog.Type == elf.PT_INTERP {
			return ""
		}
	}
	return p
}

// absent returns the packages that are missing. build includes those that only compiling
// needs.
func absent(needs []need, build bool) []string {
	var pkgs []string
	for _, n := range needs {
		if (!n.build || build) && !n.present() {
			pkgs = append(pkgs, n.pkg)
		}
	}
	return pkgs
}

// canInstall reports whether this process may install packages. If it may, a failed
// installation is an error and not a reason to skip.
func canInstall(install bool) bool {
	return install && os.Geteuid() == 0 && lookTool("apt-get") != ""
}

// installPackages installs the missing packages. If it cannot install, missing headers and
// compilers alone are not an error, because booting does not need them.
func installPackages(ctx context.Context, install bool, log io.Writer) error {
	wanted := absent(needs, true)
	if len(wanted) == 0 {
		return nil
	}
	if !canInstall(install) {
		blocking := absent(needs, false)
		switch {
		case len(blocking) == 0:
			return nil
		case lookTool("apt-get") == "":
			return &MissingError{strings.Join(blocking, ", "), "there is no apt-get here; install them, or what this system calls them"}
		}
		return &MissingError{strings.Join(blocking, ", "), "run as root: apt-get install --no-install-recommends " + strings.Join(wanted, " ")}
	}
	fmt.Fprintf(log, "rxevm: installing %s\n", strings.Join(wanted, " "))
	args := append([]string{"install", "-y", "--no-install-recommends"}, wanted...)
	err := apt(ctx, "", args...)
	if err != nil {
		// In containers the package lists are often absent, or name versions that are no longer
		// in the archive.
		if err = apt(ctx, "", "update"); err == nil {
			err = apt(ctx, "", args...)
		}
	}
	wanted = absent(needs, true)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case len(wanted) != 0 && err != nil:
		return fmt.Errorf("cannot install %s: %w (QUARRY_NO_INSTALL=1 skips what needs them)", strings.Join(wanted, ", "), err)
	case len(wanted) != 0:
		return fmt.Errorf("installed %s, and still not found", strings.Join(wanted, ", "))
	}
	return nil
}

// aptPatience bounds the wait for other installers.
const aptPatience = 15 * time.Minute

// apt runs apt-get and returns its last error line as the error. It waits for other
// installers: apt-get itself waits only for the lock of dpkg, and fails at once if another
// process holds the lock of the package lists or of the archives.
func apt(ctx context.Context, dir string, args ...string) error {
	for end := time.Now().Add(aptPatience); ; {
		err := aptOnce(ctx, dir, args...)
		if err == nil || !lockHeld(err) || time.Now().After(end) {
			return err
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// lockHeld reports whether apt-get failed because another installer held a lock.
func lockHeld(err error) bool {
	for _, says := range []string{"Could not get lock", "Unable to lock", "Unable to acquire"} {
		if strings.Contains(err.Error(), says) {
			return true
		}
	}
	return false
}

func aptOnce(ctx context.Context, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-q", "-o", "Dpkg::Use-Pty=0", "-o", fmt.Sprintf("DPkg::Lock::Timeout=%.0f", aptPatience.Seconds())}, args...)...)
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C")
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err == nil {
		return nil
	}
	for line := range bytes.Lines(out) {
		if bytes.HasPrefix(line, []byte("E: ")) {
			return fmt.Errorf("apt-get %s: %s", args[0], bytes.TrimSpace(line[3:]))
		}
	}
	return fmt.Errorf("apt-get %s: %w", args[0], err)
}
