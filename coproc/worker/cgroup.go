package worker

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// This file has a cgroup of version 2 for each slot, where the worker's own one is delegated to it.

// slotPids bounds the threads and processes of a slot: a program that makes them without end ends alone.
const slotPids = 2048

// cgroups are those of a worker's slots. The kernel gives limits to the children of a cgroup only if no process is in the cgroup itself, so the
// worker moves into a child too.
type cgroups struct {
	dir  string // of the cgroup that the worker has begun in
	name string // prefix of the children's names
	made atomic.Uint64
}

// ownCgroup is the folder of this process's cgroup of version 2, by the contents of /proc/self/cgroup and /proc/self/mountinfo.
func ownCgroup(cgroup, mounts string) (string, error) {
	path, ok := "", false
	for line := range strings.Lines(cgroup) {
		if rest, is := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "0::"); is {
			path, ok = rest, true
		}
	}
	if !ok {
		return "", errors.New("the kernel has no cgroups of version 2")
	}
	for line := range strings.Lines(mounts) {
		before, after, _ := strings.Cut(line, " - ")
		fields, kind := strings.Fields(before), strings.Fields(after)
		if len(fields) < 5 || len(kind) < 1 || kind[0] != "cgroup2" {
			continue
		}
		rest, in := strings.CutPrefix(path, strings.TrimSuffix(fields[3], "/"))
		if !in || rest != "" && rest[0] != '/' {
			continue // the mount shows another part of the tree
		}
		return filepath.Join(fields[4], rest), nil
	}
	return "", errors.New("no file system of type cgroup2 is mounted")
}

// newCgroups makes this process's cgroup the parent of cgroups with limits. An error says what it lacks; nothing is changed then.
func newCgroups() (*cgroups, error) {
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	dir, err := ownCgroup(string(own), string(mounts))
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(filepath.Join(dir, "cgroup.type")); err != nil { // the root cgroup alone has none
		return nil, fmt.Errorf("%s is the host's root cgroup, which is not the worker's alone", dir)
	}
	have, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return nil, err
	}
	controllers := strings.Fields(string(have))
	for _, want := range []string{"memory", "pids"} {
		if !slices.Contains(controllers, want) {
			return nil, fmt.Errorf("%s does not have the controller %s: it has %q", dir, want, controllers)
		}
	}
	c := &cgroups{dir: dir, name: fmt.Sprintf("quarry-worker.%d", os.Getpid())}
	enable := "+memory +pids"
	if slices.Contains(controllers, "cpu") {
		enable += " +cpu"
	}
	leaf := filepath.Join(dir, c.name)
	if err := os.Mkdir(leaf, 0o755); err != nil {
		return nil, fmt.Errorf("the worker's cgroup is not delegated to it: %w", err)
	}
	if err = c.enter(leaf); err == nil {
		err = write(dir, "cgroup.subtree_control", enable)
	}
	if err == nil {
		if err = canBegin(leaf); err != nil {
			c.disable()
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("the worker's cgroup cannot have children with limits: %w", err), c.leave())
	}
	return c, nil
}

// canBegin says why no process can be made in a cgroup: a kernel before 5.7, or a filter of system calls, does not have clone3.
func canBegin(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	const none = "/proc/self/no such program"
	_, err = syscall.ForkExec(none, []string{none}, &syscall.ProcAttr{Sys: &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(f.Fd())}})
	if errors.Is(err, syscall.ENOENT) { // the process was made, and has not found the program
		return nil
	}
	return fmt.Errorf("clone3 into a cgroup: %w", err)
}

// enter moves this process into a cgroup.
func (c *cgroups) enter(dir string) error {
	return write(dir, "cgroup.procs", strconv.Itoa(os.Getpid()))
}

// leave moves this process back, and removes its child.
func (c *cgroups) leave() error {
	if err := c.enter(c.dir); err != nil {
		return err
	}
	return os.Remove(filepath.Join(c.dir, c.name))
}

// close undoes newCgroups when all slots have ended. An error is ignored: what is left goes with the parent.
func (c *cgroups) close() {
	left, _ := filepath.Glob(filepath.Join(c.dir, c.name+".*"))
	for _, dir := range left {
		_ = os.Remove(dir)
	}
	c.disable()
	_ = c.leave()
}

// disable takes the controllers from the children.
func (c *cgroups) disable() {
	for _, controller := range []string{"-cpu", "-pids", "-memory"} {
		_ = write(c.dir, "cgroup.subtree_control", controller)
	}
}

// slot makes a cgroup with limits for one process of a slot. The next one has another: processes that the kernel cannot end yet may be left in this one, and
// the count of those that it has ended.
func (c *cgroups) slot(limit uint64) (dir string, err error) {
	dir = filepath.Join(c.dir, fmt.Sprintf("%s.%d", c.name, c.made.Add(1)))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	for _, set := range []struct {
		file, value string
		must        bool
	}{
		{"memory.max", strconv.FormatUint(limit, 10), true},
		{"memory.swap.max", "0", false}, // there is none without swap
		{"memory.oom.group", "1", false},
		{"pids.max", strconv.Itoa(slotPids), true},
		{"cpu.weight", "100", false}, // each slot has the same share, however many threads it has
	} {
		if err := write(dir, set.file, set.value); err != nil && (set.must || !errors.Is(err, fs.ErrNotExist)) {
			return "", errors.Join(err, os.Remove(dir))
		}
	}
	return dir, nil
}

// end ends the processes that a slot has left, and removes its cgroup. An error is ignored: what is left goes with the parent.
func (c *cgroups) end(dir string) {
	_ = write(dir, "cgroup.kill", "1")
	for range endTries { // a cgroup is empty a moment after its processes have ended
		if err := os.Remove(dir); err == nil || errors.Is(err, fs.ErrNotExist) {
			return
		}
		time.Sleep(endPause)
	}
}

// endTries and endPause bound the wait for the end of a slot's processes.
const (
	endTries = 100
	endPause = 10 * time.Millisecond
)

// kills is how often the kernel has ended processes of a slot's cgroup because of its limit of memory.
func kills(dir string) (n int) {
	f, err := os.Open(filepath.Join(dir, "memory.events"))
	if err != nil {
		return 0
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if count, ok := strings.CutPrefix(s.Text(), "oom_kill "); ok {
			n, _ = strconv.Atoi(count)
		}
	}
	return n
}

// write sets a file of a cgroup. One that is not there is not made.
func write(dir, file, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}
