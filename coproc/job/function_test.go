package job_test

import (
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/plugins/add"
)

var (
	functionGates atomic.Pointer[gates] // of the running test
	functionRuns  atomic.Int64          // calls of test-appends
)

// gates stop functions.
type gates struct {
	hangs chan struct{} // closed when test-hangs may return
	began chan struct{} // closed by the first call of test-appends
	goes  chan struct{} // closed when that call may return
}

// newGates makes the gates of a test.
func newGates() *gates {
	g := &gates{make(chan struct{}), make(chan struct{}), make(chan struct{})}
	functionGates.Store(g)
	functionRuns.Store(0)
	return g
}

func init() {
	function := func(name string, f coproc.Func) {
		coproc.Register(name, "a function of tests", func() coproc.Plugin { return f })
	}
	function("test-fails", func(_, args []byte) (next, answer []byte, err error) {
		return []byte("changed"), nil, errors.New(string(args))
	})
	function("test-panics", func(_, _ []byte) (next, answer []byte, err error) { panic("at once") })
	function("test-appends", func(object, args []byte) (next, answer []byte, err error) {
		if functionRuns.Add(1) == 1 {
			g := functionGates.Load()
			close(g.began)
			<-g.goes
		}
		return append(object, args...), nil, nil
	})
	function("test-reads", func(object, _ []byte) (next, answer []byte, err error) {
		return nil, fmt.Appendf(nil, "%d bytes", len(object)), nil
	})
	function("test-long-answer", func(object, _ []byte) (next, answer []byte, err error) {
		return []byte("changed"), make([]byte, client.MaxFunctionAnswer+1), nil
	})
	function("test-long-look", func(object, _ []byte) (next, answer []byte, err error) {
		return nil, make([]byte, client.MaxFunctionAnswer+1), nil
	})
	function("test-fills", func(_, args []byte) (next, answer []byte, err error) { return make([]byte, 20<<10), nil, nil })
	function("test-hangs", func(_, _ []byte) (next, answer []byte, err error) {
		<-functionGates.Load().hangs
		return []byte("changed"), nil, nil
	})
	coproc.Register("test-beyond", "a function of tests", func() coproc.Plugin { return beyond{} })
}

// beyond asks for more than its object.
type beyond struct{}

func (beyond) Map(env coproc.Env, _, _ []byte, emit coproc.Emit) error {
	_, err1 := env.Alloc(nil)
	_, err2 := env.Read(coproc.Ref{}, nil)
	_, err3 := env.Lookup("x")
	_, err4 := env.Tree("texts")
	for _, err := range []error{err1, err2, err3, err4, env.Write(coproc.Ref{}, nil), env.Free(coproc.Ref{})} {
		if !errors.Is(err, coproc.ErrOutside) {
			return fmt.Errorf("not refused: %v", err)
		}
	}
	return emit([]byte(coproc.FuncAnswer), []byte("refused"))
}

// primary is the node that has an object's primary.
func (r *rig) primary(ref client.Ref) (name string) {
	t := r.cluster.Table()
	for _, g := range t.Regions {
		for _, n := range t.Nodes {
			if g.Id == ref.Addr.Region() && n.Id == g.Replicas[0].Node {
				name = n.Name
			}
		}
	}
	require.NotEmpty(r, name)
	return name
}

// serving waits until a worker makes calls on an object.
func (r *rig) serving(ref client.Ref) {
	require.Eventually(r, func() bool {
		_, err := coproc.Call(r.Context(), r.c, ref, "test-reads", nil)
		return err == nil
	}, patience, time.Millisecond)
}

// unlessBusy makes a call again that was not done because others came first.
func unlessBusy(call func() ([]byte, error)) ([]byte, error) {
	for {
		if answer, err := call(); !errors.Is(err, client.ErrBusy) {
			return answer, err
		}
	}
}

// settled calls a function that changes nothing until its answer comes in time.
func (r *rig) settled(ref client.Ref, name, args string) (answer []byte, err error) {
	for {
		answer, err = unlessBusy(func() ([]byte, error) { return coproc.Call(r.Context(), r.c, ref, name, []byte(args)) })
		if !errors.Is(err, client.ErrUnknown) {
			return answer, err
		}
	}
}

// between lists the numbers from first to last in steps.
func between(first, last, step int) (all []int) {
	for n := first; n <= last; n += step {
		all = append(all, n)
	}
	return all
}

// TestFunctions: functions, compiled in and uploaded, are called on objects beside their memory. Every call that was answered has taken effect
// once; one that has failed has changed nothing.
func TestFunctions(t *testing.T) {
	r := newRig(t)
	ref, err := r.c.Alloc(t.Context(), nil, client.AllocOptions{Capacity: 100})
	require.NoError(t, err)
	_, err = coproc.Call(t.Context(), r.c, ref, add.Name, nil)
	require.ErrorIs(t, err, client.ErrNoFunction, "without a worker")
	died := r.worker("w", func(c *job.Config) { c.Node = r.primary(ref) })
	r.serving(ref)
	r.upload("add", "add-wasm")

	var wg sync.WaitGroup
	var unknown atomic.Int64 // calls; a busy machine lets the time of some pass
	const callers, each = 4, 25
	for i := range callers {
		name, c := add.Name, r.cluster.Connect(client.Config{Transport: []string{client.TransportTCP, client.TransportSHM}[i%2]})
		wg.Go(func() {
			for range each {
				_, err := unlessBusy(func() ([]byte, error) { return coproc.Call(t.Context(), c, ref, name, []byte("2")) })
				if errors.Is(err, client.ErrUnknown) {
					unknown.Add(1)
				} else if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Go(func() { // by verbs, on the same object
		for range each {
			err := r.c.Update(t.Context(), ref, func(old []byte) ([]byte, error) {
				n, err := strconv.Atoi("0" + string(old))
				return strconv.AppendInt(nil, int64(n)+3, 10), err
			})
			if err != nil {
				t.Error(err)
			}
		}
	})
	wg.Wait()
	sum := callers*each*2 + each*3
	b, err := r.c.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	found, err := strconv.Atoi(string(b))
	require.NoError(t, err)
	require.Contains(t, between(sum, sum+2*int(unknown.Load()), 2), found)
	require.Eventually(t, func() bool { // the first call compiles the module, which may take longer than a call
		before, err := r.c.Read(t.Context(), ref, nil)
		require.NoError(t, err)
		answer, err := coproc.Call(t.Context(), r.c, ref, "add-wasm", []byte("-1"))
		if err == nil {
			sum, err = strconv.Atoi(string(before))
			require.NoError(t, err)
			sum--
			require.Equal(t, strconv.Itoa(sum), string(answer))
		}
		return err == nil
	}, patience, time.Millisecond)

	for name, want := range map[string]error{
		"test-fails": client.ErrFunction, "test-panics": client.ErrFunction, "test-none": client.ErrNoFunction, "test-fills": client.ErrTooLarge, "test-long-answer": client.ErrFunction, "test-long-look": client.ErrFunction, "words": client.ErrFunction,
	} {
		_, err := r.settled(ref, name, "why not")
		require.ErrorIs(t, err, want, name)
		if name == "test-fails" {
			require.ErrorContains(t, err, "why not")
		}
	}
	answer, err := r.settled(ref, "test-beyond", "")
	require.NoError(t, err)
	require.Equal(t, "refused", string(answer))
	large, err := r.c.Alloc(t.Context(), make([]byte, 2<<20), client.AllocOptions{})
	require.NoError(t, err)
	if r.primary(large) != r.primary(ref) {
		r.worker("w2", func(c *job.Config) { c.Node = r.primary(large) })
		r.serving(large)
	}
	answer, err = r.settled(large, "test-reads", "")
	require.NoError(t, err)
	require.Equal(t, "2097152 bytes", string(answer))
	for i, err := range []error{
		second(coproc.Call(t.Context(), r.c, ref, "", nil)), second(coproc.Call(t.Context(), r.c, ref, add.Name, make([]byte, client.MaxFunctionArgs+1))),
		second(coproc.Call(t.Context(), r.cluster.Connect(client.Config{ReadOnly: true}), ref, add.Name, nil)),
	} {
		require.ErrorIs(t, err, []error{client.ErrArgument, client.ErrTooLarge, client.ErrReadOnly}[i])
	}
	b, err = r.c.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	require.Equal(t, strconv.Itoa(sum), string(b), "what has failed has changed nothing")
	require.NoError(t, r.c.Free(t.Context(), ref))
	_, err = r.settled(ref, add.Name, "")
	require.ErrorIs(t, err, client.ErrFreed)
	require.Empty(t, died)
}

// TestFunctionIsCalledAgain: a change that comes while a function runs is not overwritten.
func TestFunctionIsCalledAgain(t *testing.T) {
	g := newGates()
	r := newRig(t)
	ref, err := r.c.Alloc(t.Context(), []byte("first"), client.AllocOptions{Capacity: 100})
	require.NoError(t, err)
	r.worker("w", func(c *job.Config) { c.Node = r.primary(ref) })
	r.serving(ref)
	called := make(chan error)
	go func() { called <- second(coproc.Call(t.Context(), r.c, ref, "test-appends", []byte(" and more"))) }()
	<-g.began
	werr := r.cluster.Connect(client.Config{}).Write(t.Context(), ref, []byte("second"))
	close(g.goes)
	err = <-called
	require.NoError(t, werr)
	b, rerr := r.c.Read(t.Context(), ref, nil)
	require.NoError(t, rerr)
	switch {
	case err == nil:
		require.Equal(t, "second and more", string(b))
		require.EqualValues(t, 2, functionRuns.Load())
	case errors.Is(err, client.ErrUnknown): // a machine that was busy has let the time of the call pass
		require.Contains(t, []string{"second", "second and more"}, string(b))
	default:
		require.Equal(t, "second", string(b))
	}
}

func second[T any](_ T, err error) error { return err }

// TestFunctionEndsInTime: a compiled-in function that does not return in time ends its worker. The call is unknown to its caller, and the object
// stays as it was.
func TestFunctionEndsInTime(t *testing.T) {
	g := newGates()
	r := newRig(t)
	ref, err := r.c.Alloc(t.Context(), []byte("as it was"), client.AllocOptions{Capacity: 100})
	require.NoError(t, err)
	died := r.worker("w", func(c *job.Config) { c.Node = r.primary(ref) })
	r.serving(ref)
	_, err = coproc.Call(t.Context(), r.c, ref, "test-hangs", nil)
	require.ErrorIs(t, err, client.ErrUnknown)
	require.Contains(t, <-died, "test-hangs")
	close(g.hangs)
	r.serving(ref) // the worker of the test lives on
	b, err := r.c.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	require.Equal(t, "as it was", string(b))
}
