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
)

// MissingError says that this machine cannot run the virtual machine, and why.
// Callers that can do without (tests, make targets) skip and print it.
type MissingError struct {
	What   string
	Remedy string
}

func (e *MissingError) Error() string { return "missing " + e.What + ": " + e.Remedy }

// A need is a Debian package and the way to see that it is there, however it
// came to be installed.
type need struct {
	pkg     string
	present func() bool
	// build: only compiling the verbs provider needs it, booting does not.
	build bool
}

// rdma-core itself is not in the list: it would bring udev and a new systemd
// onto the host for daemons and rules that Soft-RoCE does not use. The tool
// `rdma` is iproute2's, the rxe provider is in ibverbs-providers.
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

// lookTool also looks where an ordinary user's PATH does not lead.
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

// staticBusybox returns the path of a busybox without an interpreter: the
// initramfs holds no C library, so a dynamic one would not start there.
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

// absent returns the packages that are not there; build says whether those
// only compiling needs count.
func absent(needs []need, build bool) []string {
	var pkgs []string
	for _, n := range needs {
		if (!n.build || build) && !n.present() {
			pkgs = append(pkgs, n.pkg)
		}
	}
	return pkgs
}

// installPackages makes sure of the needs. Missing headers alone are no
// error: they are installed when possible and otherwise left to the compiler
// to complain about.
func installPackages(ctx context.Context, install bool, log io.Writer) error {
	wanted := absent(needs, true)
	if len(wanted) == 0 {
		return nil
	}
	blocking := absent(needs, false)
	remedy := "run as root: apt-get install --no-install-recommends " + strings.Join(wanted, " ")
	switch {
	case len(blocking) == 0 && (!install || os.Geteuid() != 0 || lookTool("apt-get") == ""):
		return nil
	case lookTool("apt-get") == "":
		return &MissingError{strings.Join(blocking, ", "), "there is no apt-get here; install them, or what this system calls them"}
	case !install || os.Geteuid() != 0:
		return &MissingError{strings.Join(blocking, ", "), remedy}
	}
	fmt.Fprintf(log, "rxevm: installing %s\n", strings.Join(wanted, " "))
	args := append([]string{"install", "-y", "--no-install-recommends"}, wanted...)
	err := apt(ctx, "", args...)
	if err != nil {
		// Package lists are often absent in containers, or name versions
		// that have left the archive.
		if err = apt(ctx, "", "update"); err == nil {
			err = apt(ctx, "", args...)
		}
	}
	blocking = absent(needs, false)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case len(blocking) != 0 && err != nil:
		return &MissingError{strings.Join(blocking, ", "), err.Error()}
	case len(blocking) != 0:
		return &MissingError{strings.Join(blocking, ", "), "installed, and still not found"}
	}
	return nil
}

// apt runs apt-get and turns its last error line into the error.
func apt(ctx context.Context, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, "apt-get", append([]string{"-q", "-o", "Dpkg::Use-Pty=0", "-o", "DPkg::Lock::Timeout=120"}, args...)...)
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
