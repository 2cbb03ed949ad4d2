package chaos

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Kinds of operations.
const (
	opBirth  = "birth"
	opRead   = "read"
	opWrite  = "write"  // without regard to the former value
	opUpdate = "update" // what it replaced is in Out
	opFree   = "free"
)

// Results of operations.
const (
	okResult      = "ok"
	freedResult   = "freed"   // the object has been freed, said the store
	noResult      = "no"      // not done, and never will be, said the store
	unknownResult = "unknown" // may have been done; also what the killed had under way
	badResult     = "bad"     // a payload that no worker writes
)

// never is the return of an operation that has none.
const never = math.MaxInt64

// event is one operation as its client has seen it. Times are nanoseconds of the
// host's monotonic clock, the same for all processes.
type event struct {
	worker, thread int
	kind           string
	object         string // a reference; "" for a birth without an answer
	in             string // value written
	out            string // value read, or replaced
	result         string
	call, ret      int64
}

func now() int64 {
	var t unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) != nil {
		return 0
	}
	return t.Nano()
}

// journal writes the operations of one process. What is about to change something
// is written before it is tried, straight to the file: a kill loses no line.
type journal struct {
	mu   sync.Mutex
	f    *os.File
	next int
}

func createJournal(path string) (*journal, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND|os.O_EXCL, 0o600)
	return &journal{f: f}, err
}

func (j *journal) close() error { return j.f.Close() }

func (j *journal) line(format string, args ...any) error {
	_, err := fmt.Fprintf(j.f, format, args...)
	return err
}

// begin notes what is about to be tried and returns its number.
func (j *journal) begin(e *event) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.next++
	e.call = now()
	if e.kind == opRead {
		return j.next, nil // a read has no effect, so one without an answer needs no line
	}
	return j.next, j.line("B %d %d %s %s %s %d\n", j.next, e.thread, e.kind, dash(e.object), dash(e.in), e.call)
}

// end notes the answer.
func (j *journal) end(n int, e *event) error {
	e.ret = now()
	j.mu.Lock()
	defer j.mu.Unlock()
	if e.kind == opRead {
		return j.line("R %d %d %s %s %s %d %d\n", n, e.thread, dash(e.object), dash(e.out), e.result, e.call, e.ret)
	}
	return j.line("E %d %s %s %s %d\n", n, dash(e.object), dash(e.out), e.result, e.ret)
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func undash(s string) string {
	if s == "-" {
		return ""
	}
	return s
}

// readJournals reads the histories of all workers in a folder.
func readJournals(dir string) ([]*event, error) {
	names, err := filepath.Glob(filepath.Join(dir, "worker-*.log"))
	if err != nil {
		return nil, err
	}
	var out []*event
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		worker, _ := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(filepath.Base(name), "worker-"), ".log"))
		es, err := readJournal(f, worker)
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		out = append(out, es...)
	}
	return out, nil
}

// readJournal reads one. A last line without its end is of a process that was killed.
func readJournal(r io.Reader, worker int) ([]*event, error) {
	var out []*event
	open := map[string]*event{}
	br := bufio.NewReader(r)
	for n := 1; ; n++ {
		line, err := br.ReadString('\n')
		if err == io.EOF {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		f := strings.Fields(line)
		num := func(s string) int64 {
			v, perr := strconv.ParseInt(s, 10, 64)
			if perr != nil {
				err = fmt.Errorf("line %d: %q", n, line)
			}
			return v
		}
		switch {
		case len(f) == 7 && f[0] == "B":
			e := &event{worker: worker, thread: int(num(f[2])), kind: f[3], object: undash(f[4]), in: undash(f[5]), call: num(f[6]), ret: never, result: unknownResult}
			open[f[1]] = e
			out = append(out, e)
		case len(f) == 6 && f[0] == "E" && open[f[1]] != nil:
			e := open[f[1]]
			delete(open, f[1])
			e.object, e.out, e.result, e.ret = undash(f[2]), undash(f[3]), f[4], num(f[5])
		case len(f) == 8 && f[0] == "R":
			out = append(out, &event{worker: worker, thread: int(num(f[2])), kind: opRead, object: undash(f[3]), out: undash(f[4]), result: f[5], call: num(f[6]), ret: num(f[7])})
		default:
			err = fmt.Errorf("line %d: %q", n, line)
		}
		if err != nil {
			return nil, err
		}
	}
}
