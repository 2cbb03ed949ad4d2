package rxevm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// hostDevice is an RDMA device of the host.
type hostDevice struct {
	name     string
	address  string // IPv4 of its network device; empty when it has none
	gidIndex string
}

// nativeDevice returns the first device below dir (/sys/class/infiniband) that
// has an active port, preferring one with an IPv4 RoCE v2 GID.
func nativeDevice(dir string) (hostDevice, bool) {
	var found []hostDevice
	ports, _ := filepath.Glob(filepath.Join(dir, "*", "ports", "*"))
	for _, port := range ports {
		if !strings.Contains(line(port, "state"), "ACTIVE") {
			continue
		}
		dev := hostDevice{name: filepath.Base(filepath.Dir(filepath.Dir(port)))}
		// The file of an absent GID has only zeros, or its type cannot be read.
		for i := range 256 {
			index := fmt.Sprint(i)
			if line(port, "gid_attrs/types/"+index) != "RoCE v2" {
				continue
			}
			ip := net.ParseIP(line(port, "gids/"+index))
			if ip4 := ip.To4(); ip4 != nil {
				dev.address, dev.gidIndex = ip4.String(), index
				return dev, true
			}
		}
		found = append(found, dev)
	}
	if len(found) == 0 {
		return hostDevice{}, false
	}
	return found[0], true
}

// line returns the content of a sysfs file without its newline, or "" if it cannot be read.
func line(dir, name string) string {
	b, _ := os.ReadFile(filepath.Join(dir, name))
	return strings.TrimSpace(string(b))
}

// runNative runs the command as an ordinary process.
func runNative(ctx context.Context, j Job, dev hostDevice) (Result, error) {
	where := "host device " + dev.name
	fmt.Fprintf(j.Stderr, "rxevm: this host has RDMA device %s: running without a virtual machine\n", dev.name)
	if j.OutDir != "" {
		if err := os.MkdirAll(j.OutDir, 0o755); err != nil {
			return Result{}, err
		}
	}
	cmd := exec.CommandContext(ctx, j.Command[0], j.Command[1:]...)
	cmd.Dir = j.Dir
	cmd.Env = append(j.Env[:len(j.Env):len(j.Env)], "RXE_DEVICE="+dev.name, "RXE_ROLE=both")
	if dev.address != "" {
		cmd.Env = append(cmd.Env, "RXE_SELF="+dev.address, "RXE_PEER="+dev.address, "RXE_GID_INDEX="+dev.gidIndex)
	}
	if j.OutDir != "" {
		cmd.Env = append(cmd.Env, "RXE_OUT="+j.OutDir)
	}
	cmd.Stdout, cmd.Stderr = j.Stdout, j.Stderr
	cmd.WaitDelay = 2 * time.Second
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return Result{Where: where}, ctx.Err()
	case errors.As(err, &exit) && exit.ExitCode() >= 0:
		return Result{Where: where, Code: exit.ExitCode()}, nil
	}
	return Result{Where: where}, err
}

// HostHasDevice reports whether the host has an RDMA device, so that a Job with NativeOK needs no
// Image.
func HostHasDevice() bool {
	_, ok := nativeDevice("/sys/class/infiniband")
	return ok
}
