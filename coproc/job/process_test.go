package job_test

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
)

const workerEnv = "QUARRY_TEST_WORKER"

func TestMain(m *testing.M) {
	if url := os.Getenv(workerEnv); url != "" {
		c, err := client.Connect(context.Background(), client.Config{Controllers: []string{url}})
		if err == nil {
			err = job.Work(context.Background(), job.Config{Client: c, Name: "doomed", Lease: time.Second})
		}
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(m.Run())
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
}

// A worker is killed in the middle of a part: another one runs the part again, and
// the job ends as if nothing had happened.
func TestKilledWorkersPartRunsElsewhere(t *testing.T) {
	r := newRig(t)
	entries, _ := texts(50)
	r.tree("in", entries)

	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), workerEnv+"="+r.cluster.Controller.URL())
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })

	var j *job.Job
	require.Eventually(t, func() bool {
		j, err = r.store.Submit(t.Context(), job.Spec{Plugin: "slow", Input: job.Source{Tree: "in"}, Output: "out", MapParts: 4})
		return err == nil // the worker has to be there first
	}, patience, 20*time.Millisecond)
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "begun\n", line)
	require.NoError(t, cmd.Process.Kill())

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
