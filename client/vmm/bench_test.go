package vmm_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/client/vmm"
)

// BenchmarkMemory measures what a program waits for pages of a space that is larger than the pager's memory, beside reads of the same bytes with the same
// transport, in turns. go test ./client/vmm -run - -bench Memory -benchtime 20000x
func BenchmarkMemory(b *testing.B) {
	k := newKit(b, 1)
	for _, transport := range []string{client.TransportSHM, client.TransportTCP} {
		s := k.space("bench-"+transport, 64*mib, space.Options{RegionBytes: 64 * mib})
		h := k.host("--memory", "16MiB", "--fabric", transport)
		c, err := client.Connect(b.Context(), client.Config{Controllers: []string{k.cluster.URL}, Transport: transport, Timeout: patience})
		require.NoError(b, err)
		defer c.Close()
		direct, err := space.Open(b.Context(), c, s.Name())
		require.NoError(b, err)
		m, err := vmm.Map(b.Context(), s, s.Base(), s.Bytes(), vmm.Release, h.options())
		require.NoError(b, err)
		b.Run(transport+"/faults", func(b *testing.B) { faults(b, direct, m) })
		b.Run(transport+"/scan", func(b *testing.B) { scan(b, direct, m) })
		require.NoError(b, m.Close())
	}
}

// faults touches random pages, and reads 4 KiB in turn with that. Most pages are not in the pager's memory.
func faults(b *testing.B, s *space.Space, m *vmm.Mapping) {
	mem := m.Bytes()
	rng := rand.New(rand.NewPCG(1, 2))
	buf := make([]byte, page)
	var touched, read []time.Duration
	for b.Loop() {
		at := rng.IntN(len(mem)/page) * page
		began := time.Now()
		sink += mem[at]
		touched = append(touched, time.Since(began))
		at = rng.IntN(len(mem)/page) * page
		began = time.Now()
		_, err := s.Read(context.Background(), buf, s.Base()+uint64(at))
		require.NoError(b, err)
		read = append(read, time.Since(began))
	}
	for name, d := range map[string][]time.Duration{"fault": touched, "read": read} {
		slices.Sort(d)
		// A quarter of the pages is in memory: the median of the others is behind it.
		mid := d[len(d)/2]
		if name == "fault" {
			mid = d[len(d)*5/8]
		}
		b.ReportMetric(float64(mid)/1e3, name+"-us")
		b.ReportMetric(float64(d[len(d)*3/10])/1e3, name+"-p30-us")
	}
}

// scan loads a byte of each line in sequence, and reads the same with ReadAt of 1 MiB.
func scan(b *testing.B, s *space.Space, m *vmm.Mapping) {
	mem := m.Bytes()
	buf := make([]byte, mib)
	var scanned, read time.Duration
	for b.Loop() {
		began := time.Now()
		sum := byte(0)
		for at := 0; at < len(mem); at += 64 {
			sum += mem[at]
		}
		scanned += time.Since(began)
		began = time.Now()
		for at := 0; at < len(mem); at += len(buf) {
			_, err := s.ReadAt(buf, int64(s.Base())+int64(at))
			require.NoError(b, err)
			for i := 0; i < len(buf); i += 64 {
				sum += buf[i]
			}
		}
		read += time.Since(began)
		sink += sum
	}
	total := float64(b.N) * float64(len(mem)) / 1e6
	b.ReportMetric(total/scanned.Seconds(), "scan-MB/s")
	b.ReportMetric(total/read.Seconds(), "ReadAt-MB/s")
}
