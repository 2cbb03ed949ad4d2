package rxevm

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// bootLimit bounds the time from the start of qemu to a usable RDMA device. An idle host
// needs 6 s under software emulation, one whose two cores have twenty others to serve needs
// minutes: the limit is for a guest that hangs.
const bootLimit = 10 * time.Minute

// consoleTail is how much of the guest's kernel messages is kept for an error.
const consoleTail = 4 << 10

// consoleHeading stands between an error and the kernel messages.
const consoleHeading = "; last console lines:\n"

// The file descriptors qemu inherits, in the order of exec.Cmd.ExtraFiles.
const (
	fdOut = 3 + iota
	fdErr
	fdControl
	fdLink
)

// machine is one running qemu process.
type machine struct {
	control *os.File
	events  chan string   // lines of the control port; closed when the machine has ended
	gone    chan struct{} // closed when qemu has ended and its output is drained
	stop    context.CancelFunc
	console *tail
	Boot    time.Duration
}

// hardware configures a machine.
type hardware struct {
	accel     string // kvm or tcg
	memoryMiB int
	cpus      int
	jobDir    string
	pmemDir   string   // of files for two NVDIMMs; empty: none
	pmemMiB   int      // of each
	shared    bool     // the first of them alone, which another machine has too
	outDir    string   // empty: none
	link      *os.File // one end of the wire to the other machine, or nil
	mac       string
}

// machineNice is the nice value of qemu's processes.
const machineNice = -10

// qemuArgs is the command line. It names inherited descriptors instead of ports and socket
// files, so machines that start at the same time cannot collide.
func qemuArgs(im *Image, hw hardware) []string {
	accel, cpu, kernel, linux := hw.accel, "max", "", im.vmlinuz
	if accel == "tcg" {
		// On a starved host the kernel's watchdog takes the emulated counter for unstable, and changes its scheduler's code while it runs. An emulated
		// processor can meet the breakpoint of such a change behind the change, which is an oops. The counter is the host's.
		kernel = " tsc=reliable"
		// Emulated, rep stosb and rep movsb take a step for each byte: without these features the
		// kernel clears and copies pages by words.
		accel, cpu, linux = "tcg,thread=multi", "max,-erms,-fsrm", cmp.Or(im.vmlinux, im.vmlinuz)
	}
	share := func(tag, path, more string) string {
		// A comma in a value is doubled.
		return "local,mount_tag=" + tag + ",path=" + strings.ReplaceAll(path, ",", ",,") + ",security_model=none" + more
	}
	port := func(name string, fd int) []string {
		return []string{
			"-chardev", fmt.Sprintf("socket,id=%s,fd=%d", name, fd),
			"-device", fmt.Sprintf("virtserialport,chardev=%s,name=%s", name, name),
		}
	}
	memory, nvdimms := strconv.Itoa(hw.memoryMiB)+"M", []string(nil)
	if hw.pmemDir != "" {
		memory += fmt.Sprintf(",slots=2,maxmem=%dM", hw.memoryMiB+4*hw.pmemMiB+1024)
		kernel += " rxevm.pmem"
		nvdimms = numaArgs(hw)
		// The persistence is what persistence_domain says in sysfs.
		nvdimms = append(nvdimms, "-machine", "q35,nvdimm=on,nvdimm-persistence=mem-ctrl")
		count := 2
		if hw.shared {
			count = 1
		}
		for i := range count {
			nvdimms = append(nvdimms,
				"-object", fmt.Sprintf("memory-backend-file,id=pm%d,share=on,mem-path=%s,size=%dM", i, strings.ReplaceAll(pmemFile(hw.pmemDir, i), ",", ",,"), hw.pmemMiB),
				"-device", fmt.Sprintf("nvdimm,id=nv%d,memdev=pm%d,node=%d", i, i, i))
		}
	}
	args := []string{
		"-accel", accel, "-cpu", cpu,
		"-smp", strconv.Itoa(hw.cpus), "-m", memory,
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio",
		"-kernel", linux, "-initrd", im.initrd,
		// A kernel oops ends the machine at once.
		"-append", "console=ttyS0 quiet panic=-1 oops=panic net.ifnames=0 mitigations=off" + kernel,
		"-virtfs", share("root", "/", ",readonly=on,multidevs=remap"),
		"-virtfs", share("job", hw.jobDir, ",readonly=on"),
		"-device", "virtio-rng-pci",
		"-device", "virtio-serial-pci",
	}
	args = append(args, nvdimms...)
	args = append(args, port("out", fdOut)...)
	args = append(args, port("err", fdErr)...)
	args = append(args, port("ctl", fdControl)...)
	if hw.outDir != "" {
		args = append(args, "-virtfs", share("out", hw.outDir, ",multidevs=remap"))
	}
	if hw.link == nil {
		return append(args, "-net", "none")
	}
	return append(args,
		"-netdev", fmt.Sprintf("socket,id=n0,fd=%d", fdLink),
		// An empty romfile avoids loading a network boot program, which takes 25 s.
		"-device", "virtio-net-pci,netdev=n0,romfile=,mac="+hw.mac)
}

// numaArgs gives a machine two NUMA nodes: the second has a quarter of the memory and, of several processors, the last.
func numaArgs(hw hardware) (args []string) {
	sizes := []int{hw.memoryMiB - hw.memoryMiB/4, hw.memoryMiB / 4}
	last := max(hw.cpus-1, 1)
	cpus := []string{fmt.Sprintf(",cpus=0-%d", last-1), ""}
	if hw.cpus > 1 {
		cpus[1] = fmt.Sprintf(",cpus=%d", last)
	}
	for i, size := range sizes {
		args = append(args, "-object", fmt.Sprintf("memory-backend-ram,id=ram%d,size=%dM", i, size), "-numa", fmt.Sprintf("node,nodeid=%d,memdev=ram%d%s", i, i, cpus[i]))
	}
	return args
}

func pmemFile(dir string, i int) string { return filepath.Join(dir, fmt.Sprintf("nvdimm%d", i)) }

// startMachine starts qemu. The guest reports "ready" when it has booted.
func startMachine(ctx context.Context, im *Image, hw hardware, stdout, stderr io.Writer) (*machine, error) {
	var ours, theirs []*os.File
	closeAll := func(files []*os.File) {
		for _, f := range files {
			f.Close()
		}
	}
	for _, name := range []string{"out", "err", "ctl"} {
		a, b, err := socketPair(name)
		if err != nil {
			closeAll(ours)
			closeAll(theirs)
			return nil, err
		}
		ours, theirs = append(ours, a), append(theirs, b)
	}
	ctx, stop := context.WithCancel(ctx)
	m := &machine{
		control: ours[2],
		events:  make(chan string, 4),
		gone:    make(chan struct{}),
		stop:    stop,
		console: &tail{limit: consoleTail},
	}
	cmd := exec.CommandContext(ctx, lookTool("qemu-system-x86_64"), qemuArgs(im, hw)...)
	cmd.Stdout, cmd.Stderr = m.console, m.console
	cmd.ExtraFiles = theirs
	if hw.link != nil {
		cmd.ExtraFiles = append(cmd.ExtraFiles, hw.link)
	}
	cmd.WaitDelay = 5 * time.Second
	// The kernel kills qemu when this process dies. qemu has a process group of its own, so
	// that Ctrl-C reaches only this process, which then ends qemu.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}

	started := make(chan error, 1)
	exited := make(chan struct{})
	go func() {
		// Pdeathsig fires when the *thread* that started the child ends.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(exited)
		err := cmd.Start()
		closeAll(theirs)
		started <- err
		if err == nil {
			// Tests beside the machine must not starve the leases inside it. This needs root; an
			// error leaves the priority as it was.
			_ = syscall.Setpriority(syscall.PRIO_PGRP, cmd.Process.Pid, machineNice)
			if err = cmd.Wait(); err != nil && ctx.Err() == nil {
				fmt.Fprintf(m.console, "qemu: %v\n", err)
			}
		}
	}()
	if err := <-started; err != nil {
		stop()
		closeAll(ours)
		return nil, fmt.Errorf("start qemu: %w", err)
	}

	var drained sync.WaitGroup
	drain := func(from *os.File, to io.Writer) {
		// The sockets end when qemu ends; a connection reset is an end too.
		drained.Go(func() {
			defer from.Close()
			io.Copy(to, from)
			io.Copy(io.Discard, from) // so that the guest's writes do not block after to has failed
		})
	}
	drain(ours[0], stdout)
	drain(ours[1], stderr)
	drained.Go(func() {
		defer close(m.events)
		lines := bufio.NewScanner(m.control)
		for lines.Scan() {
			m.events <- lines.Text()
		}
	})
	go func() {
		<-exited
		drained.Wait()
		m.control.Close()
		close(m.gone)
	}()
	return m, nil
}

func socketPair(name string) (ours, theirs *os.File, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair %s: %w", name, err)
	}
	// Only this process's end is non-blocking, so that os.NewFile uses the poller.
	if err := syscall.SetNonblock(fds[0], true); err != nil {
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), name), os.NewFile(uintptr(fds[1]), name+" of qemu"), nil
}

// newWire makes the two ends of a network link between machines: qemu's socket netdev sends
// packets over a stream.
func newWire() (ends [2]*os.File, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return ends, fmt.Errorf("socketpair for the wire: %w", err)
	}
	for i, fd := range fds {
		ends[i] = os.NewFile(uintptr(fd), "wire")
	}
	return ends, nil
}

// crashError means that a machine ended, or reported a failure, before its command had an
// exit code.
type crashError struct{ text string }

func (e *crashError) Error() string { return e.text }

func (m *machine) crash(what string) error {
	if t := m.console.String(); t != "" {
		what += consoleHeading + t
	}
	return &crashError{what}
}

// ready waits until the guest has its RDMA device.
func (m *machine) ready(ctx context.Context) error {
	began := time.Now()
	limit := time.NewTimer(bootLimit)
	defer limit.Stop()
	select {
	case line, ok := <-m.events:
		m.Boot = time.Since(began)
		word, rest, _ := strings.Cut(line, " ")
		switch {
		case ok && word == "ready":
			return nil
		case ok:
			return m.crash("the guest could not set up its RDMA device: " + rest)
		}
		m.kill()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return m.crash("the virtual machine ended while booting")
	case <-limit.C:
		m.kill()
		return m.crash(fmt.Sprintf("the virtual machine was not ready after %v", bootLimit))
	}
}

// run lets the command start and waits for its exit code. Preconditions: ready.
func (m *machine) run(ctx context.Context) (int, error) {
	defer m.kill()
	if _, err := io.WriteString(m.control, "go\n"); err != nil {
		return 0, m.crash("the virtual machine ended before the command began")
	}
	for line := range m.events {
		if word, rest, _ := strings.Cut(line, " "); word == "exit" {
			code, err := strconv.Atoi(rest)
			if err != nil || code < 0 || code > 255 {
				return 0, fmt.Errorf("the guest reported exit code %q", rest)
			}
			return code, nil
		}
	}
	if ctx.Err() != nil {
		return 0, ctx.Err()
	}
	m.kill()
	return 0, m.crash("the virtual machine ended while the command ran")
}

// kill ends qemu and waits until all its output has been written. No output is lost: a
// guest's write to a port returns once the host has the bytes.
func (m *machine) kill() {
	m.stop()
	go func() {
		for range m.events {
		}
	}()
	<-m.gone
}

// tail keeps the last limit bytes written to it.
type tail struct {
	mu    sync.Mutex
	limit int
	kept  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, p...)
	if over := len(t.kept) - t.limit; over > 0 {
		t.kept = append(t.kept[:0], t.kept[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.kept))
}
