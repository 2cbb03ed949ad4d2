package worker

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/verify/testbinary"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// slotRig is a cluster, and a worker of testdata/slots with processes as slots.
type slotRig struct {
	*testing.T
	c     *client.Client
	store *job.Store
	cmd   *exec.Cmd
	lines chan string // of the worker's standard error, and its slots'
	ended chan error
}

func newSlotRig(t *testing.T, args ...string) *slotRig {
	cluster := testcluster.New(t, testcluster.Options{Lease: 5 * time.Second}) // sessions of killed slots end after it
	r := &slotRig{T: t, c: cluster.Connect(client.Config{}), lines: make(chan string, 1000), ended: make(chan error, 1)}
	program := filepath.Join(testbinary.Build(t, "./coproc/worker/testdata/slots"), "slots")
	r.cmd = exec.Command(program, append([]string{"--controller", cluster.Controller.URL(), "--name", "w", "--slots", "2", "--isolate", "process", "--replicas", "1"}, args...)...)
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := r.cmd.StdoutPipe()
	require.NoError(t, err)
	errs, w, err := os.Pipe()
	require.NoError(t, err)
	r.cmd.Stderr = w
	require.NoError(t, r.cmd.Start())
	w.Close()
	go func() {
		for s := bufio.NewScanner(errs); s.Scan(); {
			t.Log(s.Text())
			r.lines <- s.Text()
		}
		close(r.lines)
	}()
	ready := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(out).ReadString('\n')
		ready <- line
		r.ended <- r.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill()
		for range r.lines { // until the slots have ended too
		}
		errs.Close()
	})
	require.Contains(t, <-ready, `"slots":"2"`)
	r.store, err = job.Open(t.Context(), r.c)
	require.NoError(t, err)
	return r
}

// says waits for a line, and returns what the parentheses of the expression match.
func (r *slotRig) says(expr string) []string {
	r.Helper()
	timeout := time.After(patience)
	for {
		select {
		case line, open := <-r.lines:
			require.True(r, open, "the worker has ended and has not said %q", expr)
			if m := regexp.MustCompile(expr).FindStringSubmatch(line); m != nil {
				return m
			}
		case <-timeout:
			r.Fatalf("the worker does not say %q", expr)
		}
	}
}

// submit submits a job over one record.
func (r *slotRig) submit(key, until string) *job.Job {
	tree, err := kv.Create(r.Context(), r.c, "in/"+key, btree.Config{})
	require.NoError(r, err)
	require.NoError(r, tree.Put(r.Context(), []byte(key), []byte("value")))
	return r.run("in/"+key, until, 1)
}

func (r *slotRig) run(in, until string, parts int) *job.Job {
	var j *job.Job
	require.Eventually(r, func() (ok bool) { // until a slot has registered
		var err error
		j, err = r.store.Submit(r.Context(), job.Spec{Plugin: "deed", Input: job.Source{Tree: in}, Output: "out/" + in, MapParts: parts, Args: map[string]string{"until": until}})
		return err == nil
	}, patience, 10*time.Millisecond)
	return j
}

func (r *slotRig) maps(j *job.Job) []*job.Part {
	parts, err := r.store.Parts(r.Context(), j.ID, "map")
	require.NoError(r, err)
	return parts
}

// fails waits until an attempt of a job's first part has failed for a reason.
func (r *slotRig) fails(j *job.Job, reason string) {
	r.Helper()
	var log string
	require.Eventually(r, func() bool {
		log = ""
		for _, p := range r.maps(j) {
			log += strings.Join(p.Log, "\n")
		}
		return regexp.MustCompile(reason).MatchString(log)
	}, patience, 20*time.Millisecond, "want %q", reason)
}

func (r *slotRig) done(j *job.Job, attempts int) {
	r.Helper()
	j, err := r.store.Wait(r.Context(), j.ID)
	require.NoError(r, err)
	require.Equal(r, job.Done, j.State, j.Error)
	for _, p := range r.maps(j) {
		require.Equal(r, attempts, p.Attempt, "%+v", p)
	}
}

// gone waits until processes have ended. They are not this process's children, and whoever they belong to may not look after them.
func (r *slotRig) gone(pids ...string) {
	r.Helper()
	for _, pid := range pids {
		require.Eventually(r, func() bool {
			b, err := os.ReadFile("/proc/" + pid + "/stat")
			return err != nil || strings.Contains(string(b), ") Z ")
		}, patience, 5*time.Millisecond)
	}
}

func (r *slotRig) file(name string) string { return filepath.Join(r.TempDir(), name) }

func create(t *testing.T, name string) { require.NoError(t, os.WriteFile(name, nil, 0o600)) }

// A part that takes more memory than its slot may have, and a slot that is killed, fail an attempt of their own part for a reason that the part's record
// has, and the part in the other slot goes on. When the worker is killed its slots end.
func TestHazard290_AGreedyPartFailsAlone(t *testing.T) {
	r := newSlotRig(t, "--memory-mib", "128")
	until := r.file("go on")
	innocent := r.submit("waits-innocent", until)
	first := r.says(`begun waits-innocent (\d+)`)[1]

	greedy := r.submit("greedy", "")
	r.fails(greedy, `attempt 1 on w/[12]: the slot's process was ended: it has taken more memory than its limit \(416 MiB, `)
	require.NoError(t, r.store.Cancel(t.Context(), greedy.ID))

	killed := r.submit("waits-killed", until)
	pid, err := strconv.Atoi(r.says(`begun waits-killed (\d+)`)[1])
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	r.fails(killed, `attempt 1 on w/[12]: the slot's process was killed \(SIGKILL\).* its own limit \(416 MiB`)
	r.says(`begun waits-killed`) // again
	create(t, until)
	r.done(innocent, 1)
	r.done(killed, 2)

	last := r.submit("waits-last", r.file("never"))
	second := r.says(`begun waits-last (\d+)`)[1]
	require.NoError(t, r.cmd.Process.Kill())
	r.gone(first, second)
	require.NoError(t, r.store.Cancel(t.Context(), last.ID))
}

// Slots that are processes keep the worker's cap of parts of one job together. At SIGTERM a part that runs goes on to its end.
func TestHazard291_SlotsThatAreProcessesDrainAndKeepCaps(t *testing.T) {
	r := newSlotRig(t, "--max-parts", "1", "--drain", "10m")
	until := r.file("go on")
	tree, err := kv.Create(t.Context(), r.c, "many", btree.Config{NodeBytes: 1024})
	require.NoError(t, err)
	for i := range 60 {
		require.NoError(t, tree.Put(t.Context(), fmt.Appendf(nil, "waits-%04d", i), []byte("a value of some length, so that there are leaves for two parts")))
	}
	capped := r.run("many", until, 2)
	r.says(`begun waits`)
	r.done(r.submit("quick", ""), 1) // by the other slot, which might have begun a part of the capped job before
	running := 0
	parts := r.maps(capped)
	require.Len(t, parts, 2)
	for _, p := range parts {
		if p.State == job.Running {
			running++
		}
	}
	require.Equal(t, 1, running)
	create(t, until)
	r.done(capped, 1)

	until = r.file("end")
	last := r.submit("waits-last", until)
	r.says(`begun waits-last`)
	require.NoError(t, r.cmd.Process.Signal(syscall.SIGTERM))
	r.says(`begins no part`)
	create(t, until)
	require.NoError(t, <-r.ended)
	part := r.maps(last)[0] // it is left to the next worker to end the job
	require.Equal(t, job.Done, part.State, "%+v", part)
	require.Equal(t, 1, part.Attempt)
	workers, err := r.store.Workers(t.Context())
	require.NoError(t, err)
	require.Empty(t, workers, "they have signed off")
}

// A worker whose slots cannot begin ends with their exit code, and says why.
func TestSlotsThatCannotBegin(t *testing.T) {
	program := filepath.Join(testbinary.Build(t, "./coproc/worker/testdata/slots"), "slots")
	cmd := exec.CommandContext(t.Context(), program, "--controller", "http://127.0.0.1:1", "--slots", "2")
	said, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Equal(t, exitFailed, cmd.ProcessState.ExitCode())
	require.Regexp(t, `slot .*/[12] has ended before it was ready: the slot's process has ended: exit status 1: worker: .*127.0.0.1:1`, string(said))
}

// The last of two claims of the only place for a job gets none, until the first is released. Other jobs and tenants have other places.
func TestPlacesOfSlots(t *testing.T) {
	file := filepath.Join(t.TempDir(), "places")
	create(t, file)
	a, b := &Slot{places: file}, &Slot{places: file}
	release := a.Take(1, 7, 1)
	require.NotNil(t, release)
	require.Nil(t, b.Take(1, 7, 1))
	require.NotNil(t, b.Take(1, 8, 1))
	require.NotNil(t, b.Take(2, 7, 1))
	require.NotNil(t, b.Take(1, 7, 2))
	require.Nil(t, a.Take(1, 7, 2))
	release()
	require.NotNil(t, a.Take(1, 7, 1))
}

func TestIsolates(t *testing.T) {
	for _, c := range []struct {
		mode    string
		slots   int
		metrics string
		memory  int
		apart   bool
		why     string
	}{
		{IsolateAuto, 1, "", 1, false, ""},
		{IsolateAuto, 2, "", 1, true, ""},
		{IsolateAuto, 2, "", 0, false, "no limit of live memory"},
		{IsolateAuto, 2, "127.0.0.1:9430", 1, false, "--metrics-listen"},
		{IsolateAuto, 17, "", 1, false, "--slots 17"},
		{IsolateProcess, 1, "127.0.0.1:9430", 1, true, ""},
		{IsolateNone, 8, "", 0, false, ""},
	} {
		apart, why, err := Isolates(c.mode, c.slots, c.memory, c.metrics)
		require.NoError(t, err)
		require.Equal(t, c.apart, apart, "%+v", c)
		require.Contains(t, why, c.why)
		require.Equal(t, c.why == "", why == "")
	}
	_, _, err := Isolates("jail", 2, 1, "")
	require.ErrorContains(t, err, `--isolate "jail"`)
	_, _, err = Isolates(IsolateProcess, 2, 0, "")
	require.ErrorContains(t, err, "needs a limit of live memory")

	for n, want := range map[int]string{1: "127.0.0.1:9430", 3: "127.0.0.1:9432"} {
		at, err := portOf("127.0.0.1:9430", n)
		require.NoError(t, err)
		require.Equal(t, want, at)
	}
	at, err := portOf("127.0.0.1:0", 3)
	require.NoError(t, err)
	require.Equal(t, "127.0.0.1:0", at)
	for _, bad := range []string{"127.0.0.1", "127.0.0.1:http", "127.0.0.1:65535"} {
		_, err := portOf(bad, 2)
		require.Error(t, err, bad)
	}
}

// What a process writes at its end is kept, and passed on.
func TestLastWords(t *testing.T) {
	var out strings.Builder
	l := &lastWords{to: io.Writer(&out)}
	text := "level=INFO msg=begun\nruntime: out of memory: cannot allocate 4 bytes\nfatal error: out of memory\n\ngoroutine 1:\n" + strings.Repeat("x", 10000) + "\n"
	for _, c := range []byte(text) {
		_, err := l.Write([]byte{c})
		require.NoError(t, err)
	}
	require.Equal(t, text, out.String())
	require.Equal(t, "runtime: out of memory: cannot allocate 4 bytes", l.words())
	require.LessOrEqual(t, cap(l.line), 2*maxWords)

	l = &lastWords{to: io.Discard}
	_, err := io.WriteString(l, "quarry: a cache is out of memory\npanic: later\n") // the process has survived the first
	require.NoError(t, err)
	require.Equal(t, "panic: later", l.words())
}
