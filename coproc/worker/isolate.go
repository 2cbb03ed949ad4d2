package worker

import (
	"fmt"
	"net"
	"strconv"
	"time"
)

// How the slots of a worker are kept apart.
const (
	// IsolateNone runs all slots in one process: a part that takes its memory, or ends it, ends the parts of the other slots too.
	IsolateNone = "none"
	// IsolateProcess runs each slot in a process of its own, with a limit of memory that the kernel knows.
	IsolateProcess = "process"
	// IsolateAuto is IsolateProcess for more than one slot, and IsolateNone for one, which has no other parts beside it. It is IsolateNone too
	// where IsolateProcess would need what the worker's flags do not give: a port of metrics for each slot.
	IsolateAuto = "auto"
)

// Help texts of the flags.
const (
	IsolateHelp = "How slots are kept apart. process: each is a process with a limit of memory, a quarter and 256 MiB above the flag for live memory, which is for each slot then: by a cgroup of version 2 where the worker's own is delegated to it (systemd: Delegate=yes), with limits of threads and equal shares of the processors; elsewhere the worker looks at the slot's memory and ends a slot that has more, and threads and processors have no limit; the log says which at the start. A part that takes more, or ends its process, fails alone. none: all in one process, which such a part ends. auto: process for 2 to 16 slots without a port for metrics, else none."
	DrainHelp   = "At SIGTERM or SIGINT parts that run may go on so long; then they end, and begin again on other workers."
	// DefaultDrain is less than what a storage node gives its workers to end.
	DefaultDrain = 3 * time.Second
)

// maxProcesses is how many slots IsolateAuto gives a process each: a process has a session, and takes some 30 MiB.
const maxProcesses = 16

// Isolates says whether each of a worker's slots is to be a process, and, for IsolateAuto, why not; "" if there is one slot.
func Isolates(mode string, slots, memory int, metricsListen string) (apart bool, why string, err error) {
	switch mode {
	case IsolateNone:
		return false, "", nil
	case IsolateProcess:
		if memory < 1 {
			return false, "", fmt.Errorf("--isolate %s needs a limit of live memory", mode)
		}
		return true, "", nil
	case IsolateAuto:
		switch {
		case slots > maxProcesses:
			why = fmt.Sprintf("--slots %d is more than %d", slots, maxProcesses)
		case slots > 1 && metricsListen != "":
			why = "--metrics-listen is one port, and each process needs one"
		case slots > 1 && memory < 1:
			why = "there is no limit of live memory"
		}
		return slots > 1 && why == "", why, nil
	}
	return false, "", fmt.Errorf("--isolate %q: want %s, %s or %s", mode, IsolateAuto, IsolateNone, IsolateProcess)
}

// portOf is the address of the metrics of slot n: the first one has the port that is given, the others those above.
func portOf(listen string, n int) (string, error) {
	if listen == "" {
		return "", nil
	}
	host, port, err := net.SplitHostPort(listen)
	p, perr := strconv.ParseUint(port, 10, 16)
	if err != nil || perr != nil {
		return "", fmt.Errorf("--metrics-listen %q: want HOST:PORT with a number as port: slot n has the port n-1 above it", listen)
	}
	if p != 0 {
		p += uint64(n - 1)
	}
	if p > 65535 {
		return "", fmt.Errorf("--metrics-listen %q: slot %d would have port %d", listen, n, p)
	}
	return net.JoinHostPort(host, strconv.FormatUint(p, 10)), nil
}

// hardLimit is the limit that the kernel knows for a slot with so many bytes of live memory: a quarter more for garbage that is not
// collected yet, and what a process takes that runs nothing.
func hardLimit(memory int) uint64 { return uint64(memory) + uint64(memory)/4 + 256<<20 }
