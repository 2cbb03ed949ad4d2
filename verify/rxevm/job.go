package rxevm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Job is a command to run on a machine with an RDMA device.
type Job struct {
	Command []string
	// Dir is the working directory, a path of the host; empty is the current one.
	Dir string
	// Env is the whole environment, KEY=value; nil is the caller's.
	// RXE_* (see the package comment) are added.
	Env []string
	// OutDir is a directory that the guest shares, writable, at the same path. It is made if
	// absent. Empty shares none.
	OutDir string
	// Two starts the command in two machines that are connected to each other.
	Two bool
	// NativeOK runs the command on the host if the host has an RDMA device.
	NativeOK bool
	// Accel is kvm, tcg, or empty. Empty is kvm where the processor supports it, and tcg
	// otherwise or if the machine does not boot with kvm.
	Accel string
	// MemoryMiB and CPUs of each machine; 0 is 2048 and 2.
	MemoryMiB int
	CPUs      int
	// PmemMiB is the size of each of two NVDIMMs: a DAX file system at PMEM_FSDAX and a device at PMEM_DEVDAX. 0: none.
	// A host's own device has none.
	PmemMiB int
	// PmemDir keeps the NVDIMMs for machines that come later, in a folder. They are formatted for the first machine that becomes ready. Empty: they end with
	// the machine.
	PmemDir string
	// SharedMiB, with Two, is the size of an NVDIMM that is one memory of both machines: a device at PMEM_SHARED. With one processor in
	// each, emulated machines are not coherent: each executes atomics as loads and stores. 0: none.
	SharedMiB int
	// Stdout and Stderr receive the command's output as it is written; nil discards it.
	// With Two each line starts with "server| " or "client| ".
	Stdout, Stderr io.Writer
}

// Result is the outcome of a Job.
type Result struct {
	// Code is the command's exit code; with Two that of the side that failed
	// first, 0 if both succeeded.
	Code int
	// Where is kvm, tcg, or the name of the host's device.
	Where string
	// Boot is the time from starting qemu to a usable device; 0 on the host.
	Boot time.Duration
}

// Limits of one machine. Below the lower ones the guest does not boot or its tmpfs has no
// room; a value above the upper ones is taken for a typing error.
const (
	minMemoryMiB = 256
	maxMemoryMiB = 1 << 20
	maxCPUs      = 64
	minPmemMiB   = 64 // a namespace has its page structures on it, a file system its journal
)

func (j Job) withDefaults() (Job, error) {
	var err error
	if j.Dir == "" {
		if j.Dir, err = os.Getwd(); err != nil {
			return j, err
		}
	}
	if j.Dir, err = filepath.Abs(j.Dir); err != nil {
		return j, err
	}
	if j.Env == nil {
		j.Env = os.Environ()
	}
	if j.OutDir != "" {
		if j.OutDir, err = filepath.Abs(j.OutDir); err != nil {
			return j, err
		}
	}
	if j.PmemDir != "" {
		if j.PmemDir, err = filepath.Abs(j.PmemDir); err != nil {
			return j, err
		}
	}
	if j.MemoryMiB == 0 {
		j.MemoryMiB = 2048
	}
	if j.CPUs == 0 {
		j.CPUs = 2
	}
	if j.Stdout == nil {
		j.Stdout = io.Discard
	}
	if j.Stderr == nil {
		j.Stderr = io.Discard
	}
	return j, j.validate()
}

func (j Job) validate() error {
	switch {
	case len(j.Command) == 0:
		return errors.New("no command given")
	case strings.Contains(j.Command[0], "="):
		return fmt.Errorf("command %q: an equals sign would be taken for a variable; use sh -c", j.Command[0])
	case j.MemoryMiB < minMemoryMiB || j.MemoryMiB > maxMemoryMiB:
		return fmt.Errorf("memory of %d MiB: from %d to %d", j.MemoryMiB, minMemoryMiB, maxMemoryMiB)
	case j.CPUs < 1 || j.CPUs > maxCPUs:
		return fmt.Errorf("%d processors: from 1 to %d", j.CPUs, maxCPUs)
	case j.PmemMiB != 0 && (j.PmemMiB < minPmemMiB || j.PmemMiB > maxMemoryMiB || j.Two):
		return fmt.Errorf("NVDIMMs of %d MiB: from %d to %d, and one machine", j.PmemMiB, minPmemMiB, maxMemoryMiB)
	case j.SharedMiB != 0 && (j.SharedMiB < minPmemMiB || j.SharedMiB > maxMemoryMiB || !j.Two):
		return fmt.Errorf("shared NVDIMM of %d MiB: from %d to %d, and two machines", j.SharedMiB, minPmemMiB, maxMemoryMiB)
	case j.PmemDir != "" && j.PmemMiB == 0:
		return errors.New("a folder for NVDIMMs, and no size of them")
	case j.Accel != "" && j.Accel != "kvm" && j.Accel != "tcg":
		return fmt.Errorf("acceleration %q: kvm, tcg, or empty", j.Accel)
	case j.OutDir == "/":
		return errors.New("results directory /: name a directory of its own")
	}
	return nil
}

// side is one machine of a job.
type side struct {
	role, link, mac   string
	self, peer        string // IPv4
	self6, peer6      string
	stdoutTo, errorTo io.Writer
}

const (
	address1, address2   = "10.9.0.1", "10.9.0.2"
	address61, address62 = "fd09::1", "fd09::2"
)

func (j Job) sides() []side {
	if !j.Two {
		return []side{{role: "both", link: "veth", self: address1, peer: address1,
			self6: address61, peer6: address61, stdoutTo: j.Stdout, errorTo: j.Stderr}}
	}
	// One lock, because both machines may have the same writer, and stdout and stderr are
	// often the same terminal.
	var mu sync.Mutex
	line := func(role string, w io.Writer) io.Writer { return &linePrefix{mu: &mu, w: w, prefix: role + "| "} }
	return []side{
		{role: "server", link: "eth0", mac: "52:54:00:09:00:01", self: address1, peer: address2,
			self6: address61, peer6: address62, stdoutTo: line("server", j.Stdout), errorTo: line("server", j.Stderr)},
		{role: "client", link: "eth0", mac: "52:54:00:09:00:02", self: address2, peer: address1,
			self6: address62, peer6: address61, stdoutTo: line("client", j.Stdout), errorTo: line("client", j.Stderr)},
	}
}

// flush writes an unfinished last line. Preconditions: the machine has ended.
func (s side) flush() {
	for _, w := range []io.Writer{s.stdoutTo, s.errorTo} {
		if l, ok := w.(*linePrefix); ok {
			l.flush()
		}
	}
}

// quote returns s as one word for a POSIX shell.
func quote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// config is what main.sh reads before it sets up the device.
func (s side) config(j Job) string {
	pmem := ""
	if j.PmemMiB != 0 {
		pmem = pmemFSDAX
	}
	formatted := ""
	if j.formatted() {
		formatted = "yes"
	}
	shared := ""
	if j.SharedMiB != 0 {
		shared = "yes"
	}
	return fmt.Sprintf("link=%s\nself=%s\nself6=%s\nout=%s\npmem=%s\nformatted=%s\nshared=%s\n", s.link, s.self, s.self6, quote(j.OutDir), pmem, formatted, shared)
}

// formattedFile is in Job.PmemDir once a machine that has formatted the NVDIMMs was ready.
func (j Job) formattedFile() string { return filepath.Join(j.PmemDir, "formatted") }

func (j Job) noteFormatted() error {
	if j.PmemDir == "" || j.formatted() {
		return nil
	}
	return os.WriteFile(j.formattedFile(), nil, 0o600)
}

func (j Job) formatted() bool {
	if j.PmemDir == "" {
		return false
	}
	_, err := os.Stat(j.formattedFile())
	return err == nil
}

// Where a machine with NVDIMMs has them.
const (
	pmemFSDAX  = "/run/rxevm/pmem"
	pmemDevDAX = "/dev/dax1.0"
	pmemShared = "/dev/dax0.0"
)

// script is the shell script that executes the command.
func (s side) script(j Job) string {
	var b strings.Builder
	fmt.Fprintf(&b, "cd -- %s || exit 125\nexec env -i \\\n", quote(j.Dir))
	for _, kv := range j.Env {
		if name, _, ok := strings.Cut(kv, "="); ok && name != "" && !strings.HasPrefix(name, "-") {
			fmt.Fprintf(&b, "%s \\\n", quote(kv))
		}
	}
	var fsdax, devdax, shared string
	if j.PmemMiB != 0 {
		fsdax, devdax = pmemFSDAX, pmemDevDAX
	}
	if j.SharedMiB != 0 {
		shared = pmemShared
	}
	for _, kv := range [][2]string{
		{"PMEM_FSDAX", fsdax}, {"PMEM_DEVDAX", devdax}, {"PMEM_SHARED", shared},
		{"RXE_DEVICE", "rxe0"}, {"RXE_ROLE", s.role}, {"RXE_SELF", s.self}, {"RXE_PEER", s.peer},
		{"RXE_SELF6", s.self6}, {"RXE_PEER6", s.peer6}, {"RXE_OUT", j.OutDir},
	} {
		if kv[1] != "" {
			fmt.Fprintf(&b, "%s=%s \\\n", kv[0], quote(kv[1]))
		}
	}
	b.WriteString(`"RXE_GID_INDEX=$RXE_GID_INDEX"`)
	for _, word := range j.Command {
		b.WriteString(" \\\n" + quote(word))
	}
	b.WriteString("\n")
	return b.String()
}

// Run runs the job and waits for it. When the context ends, the machine ends too and Run
// returns the context's error. A command that fails is not an error: its exit code is in the
// Result.
func (im *Image) Run(ctx context.Context, j Job) (Result, error) {
	j, err := j.withDefaults()
	if err != nil {
		return Result{}, err
	}
	if j.NativeOK && !j.Two {
		if dev, ok := nativeDevice("/sys/class/infiniband"); ok {
			return runNative(ctx, j, dev)
		}
	}
	if im == nil {
		return Result{}, errors.New("no image: call Prepare first")
	}
	if j.OutDir != "" {
		if err := os.MkdirAll(j.OutDir, 0o755); err != nil {
			return Result{}, err
		}
	}
	accel := j.Accel
	if accel == "" {
		accel = usableAccel()
	}
	result, err := im.runOn(ctx, j, accel)
	var notUp *bootError
	if accel == "tcg" && errors.As(err, &notUp) && ctx.Err() == nil {
		// In some boots of a hundred the emulated processor raises a spurious fault.
		fmt.Fprintf(im.log, "rxevm: booting once more, the command had not begun: %s\n", lastWords(err))
		return im.runOn(ctx, j, accel)
	}
	if j.Accel == "" && accel == "kvm" && errors.As(err, &notUp) && ctx.Err() == nil {
		fmt.Fprintf(im.log, "rxevm: no boot with kvm, trying tcg: %s\n", lastWords(err))
		return im.runOn(ctx, j, "tcg")
	}
	return result, err
}

// lastWords is an error in one line: what happened, and why the guest's kernel stopped if
// its console says so.
func lastWords(err error) string {
	what, console, found := strings.Cut(err.Error(), consoleHeading)
	if !found {
		return what
	}
	why := ""
	for line := range strings.Lines(console) {
		line = strings.TrimSpace(line)
		for _, word := range []string{"BUG:", "Oops", "general protection", "Kernel panic", "Unable to handle", "qemu"} {
			if strings.Contains(line, word) && len(why) < 300 {
				why += "; " + line
				break
			}
		}
	}
	if why == "" && console != "" {
		lines := strings.Split(strings.TrimSpace(console), "\n")
		why = "; " + lines[len(lines)-1]
	}
	return what + why
}

// bootError means that a machine did not boot. Its command has not begun.
type bootError struct{ error }

func (e *bootError) Unwrap() error { return e.error }

// peerTime is how long one of two machines may go on after the other has failed: enough to
// report, and no more.
const peerTime = 15 * time.Second

func (im *Image) runOn(ctx context.Context, j Job, accel string) (Result, error) {
	tmp, err := os.MkdirTemp("", "rxevm-")
	if err != nil {
		return Result{}, err
	}
	defer os.RemoveAll(tmp)

	sides := j.sides()
	var wire [2]*os.File
	if j.Two {
		if wire, err = newWire(); err != nil {
			return Result{}, err
		}
		defer wire[0].Close()
		defer wire[1].Close()
	}
	machines := make([]*machine, len(sides))
	defer func() {
		for _, m := range machines {
			if m != nil {
				m.kill()
			}
		}
		for _, s := range sides {
			s.flush()
		}
	}()
	for i, s := range sides {
		dir := filepath.Join(tmp, s.role)
		if err := writeJob(dir, s.config(j), s.script(j)); err != nil {
			return Result{}, err
		}
		hw := hardware{accel: accel, memoryMiB: j.MemoryMiB, cpus: j.CPUs, jobDir: dir, outDir: j.OutDir, link: wire[i%2], mac: s.mac}
		j.nvdimms(&hw, tmp)
		if machines[i], err = startMachine(ctx, im, hw, s.stdoutTo, s.errorTo); err != nil {
			return Result{}, err
		}
	}
	result := Result{Where: accel}
	for i, m := range machines {
		if err := m.ready(ctx); err != nil {
			return result, &bootError{sides[i].named(j, err)}
		}
		result.Boot = max(result.Boot, m.Boot)
	}
	if err := j.noteFormatted(); err != nil {
		return result, err
	}

	// All are ready; the commands start together.
	type end struct {
		side int
		code int
		err  error
	}
	ends := make(chan end, len(machines))
	for i, m := range machines {
		go func() {
			code, err := m.run(ctx)
			ends <- end{i, code, err}
		}()
	}
	var failed error
	for range machines {
		e := <-ends
		if (e.code == 0 && e.err == nil) || failed != nil || result.Code != 0 {
			continue
		}
		result.Code = e.code
		if e.err != nil {
			failed = sides[e.side].named(j, e.err)
		}
		stop := time.AfterFunc(peerTime, func() {
			for _, m := range machines {
				m.stop()
			}
		})
		defer stop.Stop()
	}
	return result, failed
}

// nvdimms gives a machine those of the job; tmp is for files that end with it.
func (j Job) nvdimms(hw *hardware, tmp string) {
	switch {
	case j.PmemMiB != 0:
		hw.pmemDir, hw.pmemMiB = cmp.Or(j.PmemDir, tmp), j.PmemMiB
	case j.SharedMiB != 0:
		hw.pmemDir, hw.pmemMiB, hw.shared = tmp, j.SharedMiB, true
	}
}

func (s side) named(j Job, err error) error {
	if j.Two {
		return fmt.Errorf("%s: %w", s.role, err)
	}
	return err
}

// writeJob writes a file that only the caller can read, because the environment is in it.
func writeJob(dir, config, script string) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(filepath.Join(dir, "config"), []byte(config), 0o600),
		os.WriteFile(filepath.Join(dir, "command"), []byte(script), 0o600))
}
