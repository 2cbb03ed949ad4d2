package job_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"iter"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/testcluster"
	"github.com/quarrystore/quarry/verify/teststop"
)

// drags makes an object of each value and emits its Ref, so that output of one attempt beside objects of another one is seen. It is held up
// in the phase and the part that have the key "slow": see drag.
type drags struct{ slow bool }

// drag is what holds up attempts of drags in this process, by whether the part's own attempt comes here first.
type drag struct {
	sync.Mutex
	at    string                   // the phase
	come  int                      // attempts that have come
	holds []func(coproc.Env) error // what each of them does, in the order in which they come; others go on
}

// slowdowns are those of this process's tests, by the name of the run, which is an argument of the job.
var slowdowns sync.Map

// slowdown has attempts of a run held up so.
func slowdown(run, at string, holds ...func(coproc.Env) error) {
	slowdowns.Store(run, &drag{at: at, holds: holds})
}

// wait holds an attempt up.
func wait(env coproc.Env) error {
	if os.Getenv(workerEnv) != "" {
		if env.Arg("at", "") != string(env.Part().Phase) {
			return nil
		}
		fmt.Println("begun")
		_, err := bufio.NewReader(os.Stdin).ReadString('\n')
		return err
	}
	v, ok := slowdowns.Load(env.Arg("run", ""))
	if !ok {
		return nil
	}
	d := v.(*drag)
	d.Lock()
	var hold func(coproc.Env) error
	if d.at == string(env.Part().Phase) {
		if d.come < len(d.holds) {
			hold = d.holds[d.come]
		}
		d.come++
	}
	d.Unlock()
	if hold == nil {
		return nil
	}
	return hold(env)
}

// forever is until the attempt is given up.
func forever(env coproc.Env) error {
	<-env.Context().Done()
	return env.Context().Err()
}

// until is until a gate is opened.
func until(came chan<- bool, gate <-chan bool) func(coproc.Env) error {
	return func(env coproc.Env) error {
		came <- true
		select {
		case <-gate:
			return nil
		case <-env.Context().Done():
			return env.Context().Err()
		}
	}
}

func (d *drags) Map(env coproc.Env, key, value []byte, emit coproc.Emit) error {
	d.slow = d.slow || string(key) == "slow"
	ref, err := env.Alloc(value)
	if err != nil {
		return err
	}
	b, err := ref.AppendBinary(nil)
	if err != nil {
		return err
	}
	return emit(key, b)
}

func (d *drags) Finish(env coproc.Env, _ coproc.Emit) error {
	if !d.slow {
		return nil
	}
	return wait(env)
}

// dragsReduce is drags with a reduce phase.
type dragsReduce struct{ drags }

func (d *dragsReduce) Map(env coproc.Env, key, value []byte, emit coproc.Emit) error {
	d.slow = d.slow || string(key) == "slow"
	return emit(key, value)
}

func (d *dragsReduce) Reduce(env coproc.Env, key []byte, values iter.Seq[[]byte], emit coproc.Emit) error {
	for v := range values {
		if err := d.drags.Map(env, key, v, emit); err != nil {
			return err
		}
	}
	if string(key) == "slow" {
		return wait(env)
	}
	return nil
}

// dragsAlone changes its output by itself, which a second attempt may not.
type dragsAlone struct{ drags }

func (d *dragsAlone) Map(env coproc.Env, key, value []byte, emit coproc.Emit) error {
	d.slow = d.slow || string(key) == "slow"
	t, err := env.Tree("out")
	if err == nil {
		_ = t.Put(key, value) // whatever the answer is
	}
	return err
}

func init() {
	coproc.Register("drags", "is slow in one part", func() coproc.Plugin { return &drags{} })
	coproc.Register("drags-reduce", "is slow in one part", func() coproc.Plugin { return &dragsReduce{} })
	coproc.Register("drags-alone", "is slow in one part", func() coproc.Plugin { return &dragsAlone{} })
}

// dragging are records for a few parts, one of which has the key "slow".
func dragging() map[string]string {
	in := map[string]string{"slow": "of the slow part"}
	for i := range 60 {
		in[fmt.Sprintf("%02d", i)] = strings.Repeat("quick ", 10)
	}
	return in
}

// named are the contents of the objects that a tree names; of "changed" entries their own.
func (r *rig) named(tree string) map[string]string {
	out := r.read(tree)
	for k, v := range out {
		if strings.HasPrefix(v, "changed") {
			continue
		}
		b, err := r.c.Read(r.Context(), proto.DecodeRef([]byte(v)), nil)
		require.NoError(r, err, "the object that %q of the output names", k)
		out[k] = string(b)
	}
	return out
}

// objects are those of jobs and plugins, runs among them.
func (r *rig) objects() (n int) {
	_, err := fsck.Cluster(r.Context(), fsck.Config{Controllers: []string{r.cluster.Controller.URL()}, Object: func(o fsck.Object) {
		if o.Tag == 0 {
			n++
		}
	}})
	require.NoError(r, err)
	return n
}

// runs are what the manifests of all jobs list, those of second attempts alone if second is set.
func (r *rig) runs(second bool) (refs []proto.Ref) {
	state, err := kv.Open(r.Context(), r.c, job.StateTree, btree.Config{})
	require.NoError(r, err)
	require.NoError(r, state.Scan(r.Context(), btree.Range{From: []byte("runs/"), To: []byte("runs0")}, func(key, value []byte, _ uint64) bool {
		var m struct{ Objects []proto.Ref }
		require.NoError(r, json.Unmarshal(value, &m))
		if !second || strings.HasSuffix(string(key), "/second") {
			refs = append(refs, m.Objects...)
		}
		return true
	}))
	return refs
}

// secondIsReady submits a job with one slow part, whose attempt by a running worker sends to came. It returns when a second attempt, by a process
// that it starts, has a result.
func (r *rig) secondIsReady(run string, came <-chan bool) (*job.Job, *process) {
	j, err := r.store.Submit(r.Context(), job.Spec{Plugin: "drags", Input: job.Source{Tree: "in"}, Output: "out", MapParts: 3, Args: map[string]string{"run": run}})
	require.NoError(r, err)
	<-came
	second := r.process(time.Second, client.TransportTCP)
	require.Eventually(r, func() bool {
		p := r.slow(j.ID)
		return p != nil && p.Second.Ready
	}, patience, time.Millisecond)
	return j, second
}

// slow is the part with a second attempt; nil if there is none yet.
func (r *rig) slow(id uint64) (slow *job.Part) {
	parts, err := r.store.Parts(r.Context(), id, "")
	require.NoError(r, err)
	for _, p := range parts {
		if p.Second != nil {
			require.Nil(r, slow, "two parts with a second attempt")
			slow = p
		}
	}
	return slow
}

// cleaned waits until a job is cleaned up, and removes it.
func (r *rig) cleaned(id uint64) {
	require.Eventually(r, func() bool { return r.store.Forget(r.Context(), id) == nil }, patience, 5*time.Millisecond)
	require.Empty(r, r.runs(false), "manifests")
}

// A part whose worker lives and never ends has a second attempt when a worker is free and the other parts are done: its result is the part's, and
// nothing of the first attempt is left. A part gets no third one, and none if its plugin changes trees.
func TestSlowPartHasASecondAttempt(t *testing.T) {
	r := newRig(t)
	in := dragging()
	r.tree("in", in)
	var tallies [2]job.Tally
	for i := range tallies {
		r.worker(fmt.Sprint(i), func(c *job.Config) { c.Slots, c.Tally = 1, &tallies[i] })
	}
	sum := func(fate string) uint64 {
		return tallies[0].Stats().Seconds[fate] + tallies[1].Stats().Seconds[fate]
	}
	ended := func(outcome string) (n uint64) {
		for i := range tallies {
			for _, by := range tallies[i].Stats().Attempts {
				n += by[outcome]
			}
		}
		return n
	}
	objects, run := 0, map[string]string{"run": t.Name()}
	for i, at := range []struct{ plugin, phase string }{{"drags", "map"}, {"drags-reduce", "map"}, {"drags-reduce", "reduce"}} {
		slowdown(t.Name(), at.phase, forever)
		out := fmt.Sprint("out", i)
		j := r.done(job.Spec{Plugin: at.plugin, Input: job.Source{Tree: "in"}, Output: out, MapParts: 3, ReduceParts: 3, Args: run})
		require.Equal(t, in, r.named(out))
		p := r.slow(j.ID)
		require.NotNil(t, p)
		require.Equal(t, at.phase, p.Phase)
		require.Equal(t, p.Second.Worker, p.Worker)
		require.Equal(t, 2, p.Attempt)
		require.Equal(t, uint64(i+1), sum("taken"))
		r.cleaned(j.ID)
		objects += len(in)
		require.Equal(t, objects, r.objects(), "nothing but what outputs name")
	}
	require.Zero(t, sum("dropped"))
	require.EqualValues(t, 3, ended("yielded"), "attempts that give way are not lost")
	require.Zero(t, ended("lost"))

	came, gate := make(chan bool, 2), make(chan bool)
	slowdown(t.Name(), "map", until(came, gate), func(env coproc.Env) error { close(gate); return forever(env) })
	j := r.done(job.Spec{Plugin: "drags", Input: job.Source{Tree: "in"}, Output: "first", MapParts: 3, Args: run})
	require.Equal(t, in, r.named("first"))
	require.Equal(t, 1, r.slow(j.ID).Attempt, "the own attempt is faster")
	require.Eventually(t, func() bool { return !r.slow(j.ID).Second.Runs() }, patience, 5*time.Millisecond, "its end is recorded")
	r.cleaned(j.ID)
	require.Eventually(t, func() bool { return sum("dropped") == 1 }, patience, 5*time.Millisecond)
	objects += len(in)
	require.Equal(t, objects, r.objects(), "nothing of the second attempt")

	came, gate = make(chan bool, 1), make(chan bool)
	slowdown(t.Name(), "map", until(came, gate))
	j, err := r.store.Submit(t.Context(), job.Spec{Plugin: "drags-alone", Input: job.Source{Tree: "in"}, Output: "out", MapParts: 3, Args: run})
	require.NoError(t, err)
	<-came
	require.Eventually(t, func() bool { return sum("dropped") == 2 }, patience, 5*time.Millisecond)
	close(gate)
	require.Equal(t, job.Done, r.wait(j.ID).State)
	require.Equal(t, in, r.read("out"))
	require.Equal(t, 1, r.slow(j.ID).Attempt)
	r.cleaned(j.ID)
	require.Equal(t, objects, r.objects())
}

// The worker of a part is stopped, killed or cut off from the controllers while the part's second attempt runs. The job ends without it, with the
// second attempt's result; when the first worker goes on, it changes nothing, and leaves nothing but the objects that its plugin has made.
func TestStoppedWorkerBesideASecondAttempt(t *testing.T) {
	for i, at := range []struct {
		plugin, fault string
		replace       bool
	}{{"drags", "stop", false}, {"drags-reduce", "stop", true}, {"drags", "kill", true}, {"drags-reduce", "cut", false}} {
		if testing.Short() && i > 0 {
			t.Log("-short: one plugin and one fault")
			continue
		}
		t.Run(at.fault+" "+at.plugin, func(t *testing.T) {
			t.Parallel()
			r := newRigWith(t, testcluster.Options{Nodes: 2, Lease: lease}, 1)
			in := dragging()
			r.tree("in", in)
			line := r.cluster.Line()
			first := r.processAt(line.URL, time.Second, client.TransportTCP)
			came, gate := make(chan bool, 1), make(chan bool)
			slowdown(t.Name(), "map", until(came, gate))
			j := r.submitOnce(job.Spec{Plugin: at.plugin, Input: job.Source{Tree: "in"}, Output: "out", MapParts: 3, ReduceParts: 1, Replace: at.replace, Args: map[string]string{"at": "map", "run": t.Name()}})
			first.says("begun")
			r.worker("second", nil)
			<-came
			switch at.fault {
			case "stop":
				require.NoError(t, teststop.Stop(first.Process.Pid))
			case "kill":
				require.NoError(t, first.Process.Kill())
			case "cut":
				line.Cut()
			}
			close(gate)
			require.Equal(t, job.Done, r.wait(j.ID).State)
			p := r.slow(j.ID)
			require.Equal(t, "second", p.Worker)
			require.Equal(t, 2, p.Attempt)
			require.Equal(t, in, r.named("out"))
			tree, err := kv.Open(t.Context(), r.c, "out", btree.Config{})
			require.NoError(t, err)
			require.NoError(t, tree.Put(t.Context(), []byte("slow"), []byte("changed since")))
			if at.replace {
				require.Eventually(t, func() bool {
					j, err := r.store.Job(t.Context(), j.ID)
					require.NoError(t, err)
					return j.Freed
				}, patience, 5*time.Millisecond)
			} else {
				r.cleaned(j.ID)
			}
			if at.fault == "stop" {
				fmt.Fprintln(first.in, "go on")
				require.NoError(t, first.Process.Signal(unix.SIGCONT))
				first.says("part is lost")
			}
			in["slow"] = "changed since"
			require.Equal(t, in, r.named("out"))
			require.Empty(t, r.runs(false))
		})
	}
}

// The worker of a second attempt is killed, or stopped before it has a result, or is slower than the part's own attempt: that ends the part, and of the
// second attempt no runs are left, neither those that it had written nor those that it writes later.
func TestSecondAttemptIsDropped(t *testing.T) {
	for _, fault := range []string{"late", "late without runs", "kill", "stop"} {
		if testing.Short() && fault != "late" {
			t.Log("-short: a second attempt that is too late")
			continue
		}
		t.Run(fault, func(t *testing.T) {
			t.Parallel()
			r := newRigWith(t, testcluster.Options{Nodes: 2, Lease: lease}, 1)
			in := dragging()
			r.tree("in", in)
			came, gate := make(chan bool, 1), make(chan bool)
			slowdown(t.Name(), "map", until(came, gate))
			r.worker("first", func(c *job.Config) { c.Slots, c.Lease = 1, time.Hour }) // it looks at its record every ten minutes
			at, plugin := map[string]string{"stop": "map"}[fault], "drags-reduce"
			if fault == "late without runs" {
				plugin = "drags"
			}
			j, err := r.store.Submit(t.Context(), job.Spec{Plugin: plugin, Input: job.Source{Tree: "in"}, Output: "out", MapParts: 3, ReduceParts: 1, Args: map[string]string{"at": at, "run": t.Name()}})
			require.NoError(t, err)
			<-came
			second := r.process(time.Second, client.TransportTCP)
			var left []proto.Ref
			if fault == "stop" {
				second.says("begun")
				require.NoError(t, teststop.Stop(second.Process.Pid))
			} else {
				require.Eventually(t, func() bool {
					p := r.slow(j.ID)
					return p != nil && p.Second.Ready
				}, patience, 5*time.Millisecond)
				left = r.runs(true)
				require.Equal(t, plugin == "drags-reduce", len(left) > 0)
				require.NotContains(t, r.read("out"), "slow", "no record is put before the part is taken")
			}
			if fault == "kill" {
				require.NoError(t, second.Process.Kill())
			}
			close(gate)
			require.Equal(t, job.Done, r.wait(j.ID).State)
			require.Equal(t, in, r.named("out"))
			p := r.slow(j.ID)
			require.Equal(t, "first", p.Worker)
			require.Equal(t, 1, p.Attempt)
			r.worker("cleaner", nil)
			r.cleaned(j.ID)
			if fault == "stop" {
				fmt.Fprintln(second.in, "go on")
				require.NoError(t, second.Process.Signal(unix.SIGCONT))
				second.says("second attempt is dropped")
				require.Empty(t, r.runs(false))
			}
			for _, ref := range left {
				_, err := r.c.Read(t.Context(), ref, nil)
				require.ErrorIs(t, err, client.ErrFreed)
			}
			require.Equal(t, len(in), r.objects(), "nothing but what the output names")
		})
	}
}

// A part whose own attempt has given way is not left to a second attempt that stands still, nor does its next attempt give way to that.
func TestPartOutlivesItsSecondAttempt(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: TestSecondAttemptIsDropped runs the same goroutines")
	}
	r := newRigWith(t, testcluster.Options{Nodes: 2, Lease: lease}, 1)
	in := dragging()
	r.tree("in", in)
	came, heirs, gate := make(chan bool, 1), make(chan bool, 9), make(chan bool)
	slow := until(heirs, gate)
	slowdown(t.Name(), "map", func(env coproc.Env) error { came <- true; return forever(env) }, slow, slow, slow)
	r.worker("first", func(c *job.Config) { c.Slots, c.Lease = 1, 12*time.Second }) // a beat is 2 s
	j, second := r.secondIsReady(t.Name(), came)
	require.NoError(t, teststop.Stop(second.Process.Pid))
	r.worker("heir", nil)
	<-heirs
	beat := r.slow(j.ID).Beat
	require.Eventually(t, func() bool { return r.slow(j.ID).Beat > beat+2 }, patience, 5*time.Millisecond)
	require.Equal(t, 2, r.slow(j.ID).Attempt, "it does not give way to the second attempt that stands still")
	close(gate)
	require.Equal(t, job.Done, r.wait(j.ID).State)
	require.Equal(t, 2, r.slow(j.ID).Attempt)
	require.Equal(t, in, r.named("out"))
	require.NoError(t, second.Process.Signal(unix.SIGCONT))
	r.cleaned(j.ID)
	require.Equal(t, in, r.named("out"))
}
