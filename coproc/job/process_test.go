package job_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// workerEnv makes the test's program a worker of the controllers at that URL; the others are its lease of
// parts and its transport.
const (
	workerEnv    = "QUARRY_TEST_WORKER"
	leaseEnv     = "QUARRY_TEST_LEASE"
	transportEnv = "QUARRY_TEST_TRANSPORT"
)

// lease is of sessions, in tests that wait for the end of one. This program has sessions too, and other work.
const lease = 5 * time.Second

func TestMain(m *testing.M) {
	if url := os.Getenv(workerEnv); url != "" {
		beat, err := time.ParseDuration(os.Getenv(leaseEnv))
		var c *client.Client
		if err == nil {
			c, err = client.Connect(context.Background(), client.Config{Controllers: []string{url}, Replicas: 1, Transport: os.Getenv(transportEnv), Logger: slog.New(slog.DiscardHandler)})
		}
		if err == nil {
			log := slog.New(slog.NewTextHandler(os.Stdout, nil))
			err = job.Work(context.Background(), job.Config{Client: c, Name: "doomed", Lease: beat, Logger: log})
		}
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// process is a worker in a process of its own, whose name is doomed.
type process struct {
	*exec.Cmd
	testing.TB
	out *bufio.Reader
	in  io.Writer
}

// process starts one. It is killed when the test ends.
func (r *rig) process(beat time.Duration, transport string) *process {
	return r.processAt(r.cluster.Controller.URL(), beat, transport)
}

// processAt starts one that reaches the controller at a URL.
func (r *rig) processAt(url string, beat time.Duration, transport string) *process {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), workerEnv+"="+url, leaseEnv+"="+beat.String(), transportEnv+"="+transport)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(r, err)
	in, err := cmd.StdinPipe()
	require.NoError(r, err)
	require.NoError(r, cmd.Start())
	r.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return &process{cmd, r, bufio.NewReader(out), in}
}

// says returns when the process has written a line with these words.
func (p *process) says(words string) {
	p.Helper()
	defer time.AfterFunc(patience, func() { _ = p.Process.Kill() }).Stop() // its output ends with it
	for {
		line, err := p.out.ReadString('\n')
		require.NoError(p, err, "it has not said %q", words)
		if strings.Contains(line, words) {
			return
		}
	}
}

// submitOnce submits a job as soon as a worker is there for it.
func (r *rig) submitOnce(spec job.Spec) (j *job.Job) {
	require.Eventually(r, func() (ok bool) {
		var err error
		j, err = r.store.Submit(r.Context(), spec)
		return err == nil
	}, patience, 20*time.Millisecond)
	return j
}

// slow says on standard output that it has begun, and waits, in a worker that is
// going to be killed; elsewhere it is quick.
type slow struct{}

func (slow) Map(env coproc.Env, key, value []byte, emit coproc.Emit) error {
	if err := emit(key, value); err != nil {
		return err
	}
	if os.Getenv(workerEnv) != "" {
		fmt.Println("begun")
		<-env.Context().Done()
	}
	return nil
}

func init() {
	coproc.Register("slow", "waits to be killed", func() coproc.Plugin { return slow{} })
	if os.Getenv(workerEnv) == "" {
		coproc.Register("own", "is not in the processes of other workers", func() coproc.Plugin { return odd{} })
	}
}

// A worker is killed in the middle of a part: another one runs the part again, and
// the job ends as if nothing had happened.
func TestKilledWorkersPartRunsElsewhere(t *testing.T) {
	r := newRigWith(t, testcluster.Options{Nodes: 2, Lease: lease}, 1)
	entries, _ := texts(50)
	r.tree("in", entries)

	p := r.process(time.Second, client.TransportAuto)
	j := r.submitOnce(job.Spec{Plugin: "slow", Input: job.Source{Tree: "in"}, Output: "out", MapParts: 4})
	p.says("begun")
	require.NoError(t, p.Process.Kill())

	r.worker("heir", nil)
	require.Equal(t, job.Done, r.wait(j.ID).State)
	require.Equal(t, entries, r.read("out"))
	parts, err := r.store.Parts(t.Context(), j.ID, "map")
	require.NoError(t, err)
	again := 0
	for _, p := range parts {
		if p.Attempt == 2 {
			again++
			require.Equal(t, "heir", p.Worker)
		}
	}
	require.Equal(t, 1, again)
}

// A worker passes over the parts of a plugin that it has not, and runs those of later jobs; the job waits, says why,
// and is done when a worker with the plugin is there.
func TestWorkersClaimWhatTheyCanRun(t *testing.T) {
	r := newRig(t)
	in := map[string]string{"a": "1"}
	r.tree("in", in)
	ctx, stop := context.WithCancel(t.Context())
	owner := make(chan error, 1)
	go func() {
		owner <- job.Work(ctx, job.Config{Client: r.c, Name: "owner", Lease: time.Second, Logger: slog.New(slog.DiscardHandler)})
	}()
	busy := r.submitOnce(job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: "none", MapParts: 1, Args: map[string]string{"do": "wait"}})
	parts := func(id uint64) []*job.Part {
		all, err := r.store.Parts(t.Context(), id, "map")
		require.NoError(t, err)
		return all
	}
	require.Eventually(t, func() bool {
		all := parts(busy.ID)
		return len(all) == 1 && all[0].State == job.Running
	}, patience, 5*time.Millisecond)

	j := r.submitOnce(job.Spec{Plugin: "own", Input: job.Source{Tree: "in"}, Output: "out", MapParts: 1})
	r.process(time.Second, client.TransportAuto) // lacks it; the owner's only slot is taken
	r.done(job.Spec{Plugin: "odd", Input: job.Source{Tree: "in"}, Output: "later", MapParts: 1})
	all := parts(j.ID)
	require.Len(t, all, 1, "the plan needs no plugin")
	require.Zero(t, all[0].Attempt, "%+v", all[0])
	why, err := r.store.Unserved(t.Context(), j)
	require.NoError(t, err)
	require.Empty(t, why)

	stop()
	require.NoError(t, <-owner)
	require.NoError(t, r.store.Cancel(t.Context(), busy.ID))
	why, err = r.store.Unserved(t.Context(), j)
	require.NoError(t, err)
	require.Equal(t, "none of the 1 workers that are there has plugin own: start one that has", why)
	r.worker("owner again", nil)
	require.Equal(t, job.Done, r.wait(j.ID).State)
	require.Equal(t, in, r.read("out"))
}

// leaves is slow with a reduce phase: when it is killed its runs are written.
type leaves struct {
	slow //lint:ignore U1000 its Map is used
}

func (leaves) Reduce(_ coproc.Env, key []byte, values iter.Seq[[]byte], emit coproc.Emit) error {
	for v := range values {
		if err := emit(key, v); err != nil {
			return err
		}
	}
	return nil
}

func (leaves) Map(_ coproc.Env, key, value []byte, emit coproc.Emit) error {
	large := bytes.Repeat(value, 40<<20/len(value))
	for i := range 2 { // more than is spilled at a time
		if err := emit(fmt.Append(key, i), large[:len(large)-i]); err != nil {
			return err
		}
	}
	return nil
}

func (leaves) Finish(env coproc.Env, _ coproc.Emit) error {
	if os.Getenv(workerEnv) != "" {
		fmt.Println("begun")
		<-env.Context().Done()
	}
	return nil
}

func init() {
	coproc.Register("leaves", "waits to be killed with runs written", func() coproc.Plugin { return leaves{} })
}

// Runs of a worker that was killed are freed when the job has ended, by the manifest of its attempt.
func TestKilledWorkersRunsAreFreed(t *testing.T) {
	r := newRigWith(t, testcluster.Options{Nodes: 2, Lease: lease, RegionBytes: 256 << 20}, 1)
	r.tree("in", map[string]string{"a": "stone "})
	p := r.process(time.Second, client.TransportAuto)
	j := r.submitOnce(job.Spec{Plugin: "leaves", Input: job.Source{Tree: "in"}, Output: "out", MapParts: 1, ReduceParts: 1, ShuffleBytes: 200 << 20})
	p.says("begun")
	tree, err := kv.Open(t.Context(), r.c, job.StateTree, btree.Config{})
	require.NoError(t, err)
	listed := func() (refs []proto.Ref) {
		require.NoError(t, tree.Scan(t.Context(), btree.Range{From: []byte("runs/"), To: []byte("runs0")}, func(_, value []byte, _ uint64) bool {
			var m struct{ Objects []proto.Ref }
			require.NoError(t, json.Unmarshal(value, &m))
			refs = append(refs, m.Objects...)
			return true
		}))
		return refs
	}
	left := listed()
	require.NotEmpty(t, left)
	for _, ref := range left {
		_, err := r.c.Read(t.Context(), ref, nil)
		require.NoError(t, err)
	}
	require.NoError(t, p.Process.Kill())
	require.NoError(t, r.store.Cancel(t.Context(), j.ID))
	r.worker("heir", nil)
	require.Eventually(t, func() bool { return len(listed()) == 0 }, patience, 10*time.Millisecond)
	for _, ref := range left {
		_, err := r.c.Read(t.Context(), ref, nil)
		require.ErrorIs(t, err, client.ErrFreed)
	}
}
