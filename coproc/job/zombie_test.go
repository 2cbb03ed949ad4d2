package job_test

import (
	"bufio"
	"fmt"
	"io"
	"iter"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/testcluster"
	"github.com/quarrystore/quarry/verify/teststop"
)

// zombie makes an object of each value and emits its Ref. In a process of its own it waits, with all
// work done but the writing, for a line on standard input.
type zombie struct{}

func (zombie) Map(env coproc.Env, key, value []byte, emit coproc.Emit) error {
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

func (zombie) Finish(coproc.Env, coproc.Emit) error {
	if os.Getenv(workerEnv) != "" {
		fmt.Println("begun")
		_, err := bufio.NewReader(os.Stdin).ReadString('\n')
		return err
	}
	return nil
}

// zombieReduce is zombie whose reduce phase waits.
type zombieReduce struct{ zombie }

func (zombieReduce) Map(_ coproc.Env, key, value []byte, emit coproc.Emit) error {
	return emit(key, value)
}

func (zombieReduce) Finish(coproc.Env, coproc.Emit) error { return nil }

func (z zombieReduce) Reduce(env coproc.Env, key []byte, values iter.Seq[[]byte], emit coproc.Emit) error {
	for v := range values {
		if err := z.zombie.Map(env, key, v, emit); err != nil {
			return err
		}
	}
	if string(key) == "z" {
		return z.zombie.Finish(env, emit)
	}
	return nil
}

func init() {
	coproc.Register("zombie", "waits to be stopped before it writes", func() coproc.Plugin { return zombie{} })
	coproc.Register("zombie-reduce", "waits to be stopped before it writes", func() coproc.Plugin { return zombieReduce{} })
}

// A worker stops in an attempt, another one takes its part over and the job ends. When the first worker goes on,
// it changes nothing: neither what was put into the output since, nor what the output names. Its beat is once in
// ten minutes: it has no way to hear that the part is lost but the answers to its writes. Over shm the storage node
// ends a process that keeps memory of a session that is over.
func TestStoppedWorkerChangesNothingAfterTheJob(t *testing.T) {
	for _, transport := range []string{client.TransportTCP, client.TransportSHM} {
		for _, plugin := range []string{"zombie", "zombie-reduce"} {
			if testing.Short() && (transport != client.TransportTCP || plugin != "zombie") {
				t.Log("-short: one transport and one phase")
				continue
			}
			t.Run(plugin+" over "+transport, func(t *testing.T) {
				r := newRigWith(t, testcluster.Options{Nodes: 2, Lease: lease}, 1)
				in := map[string]string{"a": "1", "b": "2", "z": "3"}
				r.tree("in", in)
				p := r.process(time.Hour, transport)
				j := r.submitOnce(job.Spec{Plugin: plugin, Input: job.Source{Tree: "in"}, Output: "out", MapParts: 1, ReduceParts: 1})
				p.says("begun")
				require.NoError(t, teststop.Stop(p.Process.Pid))
				r.worker("heir", nil)
				require.Equal(t, job.Done, r.wait(j.ID).State)
				tree, err := kv.Open(t.Context(), r.c, "out", btree.Config{})
				require.NoError(t, err)
				require.NoError(t, tree.Put(t.Context(), []byte("a"), []byte("changed since")))
				require.NoError(t, tree.Delete(t.Context(), []byte("b")))

				fmt.Fprintln(p.in, "go on")
				require.NoError(t, p.Process.Signal(unix.SIGCONT))
				if transport == client.TransportTCP {
					p.says("part is lost")
				} else {
					_, err := io.Copy(io.Discard, p.out)
					require.NoError(t, err)
				}
				out := r.read("out")
				require.Len(t, out, 2)
				require.Equal(t, "changed since", out["a"])
				b, err := r.c.Read(t.Context(), proto.DecodeRef([]byte(out["z"])), nil)
				require.NoError(t, err, "the object that the output names")
				require.Equal(t, "3", string(b))
			})
		}
	}
}
