package job_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/plugins/words"
)

// touch reads every byte of its input once, as the copy that brought it has.
type touch struct{}

func (touch) Map(coproc.Env, []byte, []byte, coproc.Emit) error { return nil }

func init() { coproc.Register("touch", "reads", func() coproc.Plugin { return touch{} }) }

// BenchmarkMapObjects reads objects of 1 MiB in a job of many parts; beside it a
// cold copy of as many bytes.
func BenchmarkMapObjects(b *testing.B) {
	const objects, size = 1024, 1 << 20
	r := newRig(b)
	payload := make([]byte, size)
	for i := range payload {
		payload[i] = byte(i)
	}
	for i := range objects {
		ref, err := r.c.Alloc(b.Context(), payload, client.AllocOptions{WriteOnce: true})
		require.NoError(b, err)
		_, err = r.c.Names().Create(b.Context(), fmt.Sprintf("big/%04d", i), "object", ref)
		require.NoError(b, err)
	}
	small := r.tree("small", nil)
	for i := range 1000 {
		require.NoError(b, small.Put(b.Context(), fmt.Appendf(nil, "%04d", i), make([]byte, 200)))
	}
	r.worker("w", func(c *job.Config) { c.Slots = 1 })
	parts := 0
	run := func(b *testing.B, spec job.Spec) {
		j, err := r.store.Submit(b.Context(), spec)
		require.NoError(b, err)
		j, err = r.store.Wait(b.Context(), j.ID)
		require.NoError(b, err)
		require.Equal(b, job.Done, j.State, j.Error)
		parts = j.Maps
	}
	b.Run("copy", func(b *testing.B) {
		cold := make([]byte, objects*size)
		for i := range cold {
			cold[i] = byte(i)
		}
		dst := make([]byte, size)
		b.SetBytes(objects * size)
		for b.Loop() {
			for i := range objects {
				copy(dst, cold[i*size:])
			}
		}
	})
	b.Run("job", func(b *testing.B) {
		b.SetBytes(objects * size)
		for b.Loop() {
			run(b, job.Spec{Plugin: "touch", Input: job.Source{Objects: "big/"}, Output: "none", MapParts: 4})
		}
	})
	b.Run("one part", func(b *testing.B) {
		for b.Loop() {
			run(b, job.Spec{Plugin: "touch", Input: job.Source{Objects: "big/0000"}, Output: "none", MapParts: 1})
		}
	})
	// What a part costs that has nothing to do: the job above has one of them.
	b.Run("parts", func(b *testing.B) {
		began := time.Now()
		for b.Loop() {
			run(b, job.Spec{Plugin: "touch", Input: job.Source{Tree: "small"}, Output: "none", MapParts: job.MaxParts})
		}
		b.ReportMetric(float64(time.Since(began).Microseconds())/1e3/float64(b.N*parts), "ms/part")
		b.ReportMetric(float64(parts), "parts")
	})
	// As many calls of a function in this process, with one round each.
	b.Run("calls", func(b *testing.B) {
		ref, err := r.c.Alloc(b.Context(), []byte("x"), client.AllocOptions{})
		require.NoError(b, err)
		began := time.Now()
		for b.Loop() {
			for range parts {
				value, err := r.c.Read(b.Context(), ref, nil)
				require.NoError(b, err)
				require.NoError(b, touch{}.Map(nil, nil, value, nil))
			}
		}
		b.ReportMetric(float64(time.Since(began).Microseconds())/1e3/float64(b.N*max(1, parts)), "ms/part")
	})
}

// BenchmarkWASM counts words compiled in and as a module.
func BenchmarkWASM(b *testing.B) {
	r := newRig(b)
	entries, _ := texts(2000)
	t := r.tree("texts", nil)
	total := 0
	for k, v := range entries {
		v = strings.Repeat(v+" ", 24)
		total += len(v)
		require.NoError(b, t.Put(b.Context(), []byte(k), []byte(v)))
	}
	r.worker("w", func(c *job.Config) { c.Slots = 1 })
	r.upload("words", "words-wasm")
	for _, plugin := range []string{words.Name, "words-wasm"} {
		run := func() {
			j := r.run(job.Spec{Plugin: plugin, Input: job.Source{Tree: "texts"}, Output: "counts", MapParts: 2, ReduceParts: 1})
			require.Equal(b, job.Done, j.State, j.Error)
		}
		run() // compiles the module
		b.Run(plugin, func(b *testing.B) {
			b.SetBytes(int64(total))
			for b.Loop() {
				run()
			}
		})
	}
}
