package sim

import (
	"context"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
)

const testBytes = 1 << 20

func fabricOf(seed uint64, p Profile) (*Fabric, *Memory, *Conn, *rdma.Target) {
	rng := rand.New(rand.NewPCG(seed, 1))
	f := New(rng.IntN)
	m := f.AddNode().AddMemory(1, testBytes, p)
	m.Open(1)
	c, err := f.Dial(5, m.Node)
	if err != nil {
		panic(err)
	}
	w, err := c.Open(context.Background(), 1, 1)
	if err != nil {
		panic(err)
	}
	return f, m, c, &rdma.Target{Conn: c, Window: w}
}

func TestVerbsDoWhatTheySay(t *testing.T) {
	_, m, _, to := fabricOf(1, EADR)
	var r rdma.Round
	c := r.Chain(to)
	buf := make([]byte, 300)
	c.Write(100, []byte("hello"))
	c.CAS(512, 0, 7)
	c.FetchAdd(520, 3)
	c.Fenced()
	c.Read(0, buf)
	c.Flush(rdma.Persistent, 0, 600)
	rdma.Do(&r)
	require.NoError(t, r.Err())
	require.Equal(t, 5, r.At(0).Done)
	require.Equal(t, "hello", string(buf[100:105]))
	require.Equal(t, uint64(7), m.Word(512))
	require.Equal(t, uint64(3), m.Word(520))
}

func TestRefusals(t *testing.T) {
	for name, c := range map[string]struct {
		want error
		add  func(*rdma.Chain)
	}{
		"beyond the end":  {rdma.ErrBounds, func(c *rdma.Chain) { c.Read(testBytes-4, make([]byte, 8)) }},
		"offset overflow": {rdma.ErrBounds, func(c *rdma.Chain) { c.Write(1<<64-4, make([]byte, 8)) }},
		"nothing":         {rdma.ErrBounds, func(c *rdma.Chain) { c.Read(0, nil) }},
		"unaligned":       {rdma.ErrAlign, func(c *rdma.Chain) { c.CAS(4, 0, 1) }},
		"not persistent":  {rdma.ErrNotPersistent, func(c *rdma.Chain) { c.Flush(rdma.Persistent, 0, 8) }},
	} {
		_, m, _, to := fabricOf(1, DRAM)
		var r rdma.Round
		ch := r.Chain(to)
		c.add(ch)
		ch.CAS(64, 0, 1)
		ch.Fenced()
		rdma.Do(&r)
		require.ErrorIs(t, r.Err(), c.want, name)
		require.ErrorIs(t, r.Err(), rdma.ErrRefused, name)
		require.Zero(t, m.Word(64), "%s: what is behind a refused verb never runs", name)
	}
}

// TestFenceFlagOrders: without the flag a WRITE may overtake a READ of its chain,
// with it never; a READ never overtakes anything.
func TestFenceFlagOrders(t *testing.T) {
	overtaken := map[bool]int{}
	for seed := range uint64(400) {
		for _, fence := range []bool{false, true} {
			_, _, _, to := fabricOf(seed, DRAM)
			var r rdma.Round
			c := r.Chain(to)
			before, after := make([]byte, 8), make([]byte, 8)
			c.Read(0, before)
			c.Write(0, []byte("overtake"))
			if fence {
				c.Fenced()
			}
			c.Read(0, after)
			rdma.Do(&r)
			require.NoError(t, r.Err())
			require.Equal(t, "overtake", string(after))
			if before[0] != 0 {
				overtaken[fence]++
			}
		}
	}
	require.NotZero(t, overtaken[false])
	require.Zero(t, overtaken[true])
}

// TestTornByLines: a READ that runs beside a WRITE sees any mixture of lines, and
// whole lines only.
func TestTornByLines(t *testing.T) {
	seen := map[string]bool{}
	for seed := range uint64(300) {
		f, m, _, to := fabricOf(seed, DRAM)
		other, err := f.Dial(6, m.Node)
		require.NoError(t, err)
		w, err := other.Open(context.Background(), 1, 1)
		require.NoError(t, err)
		to2 := &rdma.Target{Conn: other, Window: w}
		var r rdma.Round
		ones := make([]byte, 192)
		for i := range ones {
			ones[i] = 1
		}
		got := make([]byte, 192)
		r.Chain(to).Write(0, ones)
		r.Chain(to2).Read(0, got)
		rdma.Do(&r)
		require.NoError(t, r.Err())
		s := ""
		for i := 0; i < 192; i += 64 {
			for _, b := range got[i : i+64] {
				require.Equal(t, got[i], b, "a line is whole")
			}
			s += string('0' + rune(got[i]))
		}
		seen[s] = true
	}
	require.Len(t, seen, 8)
}

// TestBrokenChainRunsLater: after ErrBroken a chain may still run, until Reset.
func TestBrokenChainRunsLater(t *testing.T) {
	ran := map[bool]int{}
	for _, reset := range []bool{false, true} {
		f, m, c, to := fabricOf(1, DRAM)
		var r rdma.Round
		ch := r.Chain(to)
		ch.CAS(0, 0, 9)
		c.Post(ch)
		c.Break()
		require.ErrorIs(t, ch.Err, rdma.ErrBroken)
		if reset {
			require.NoError(t, c.Reset(context.Background()))
		}
		for f.StepAny() {
		}
		ran[reset] = int(m.Word(0))
	}
	require.Equal(t, map[bool]int{false: 9, true: 0}, ran)
}

// TestHazard08_NothingRunsAfterRevoke: and nothing under rotated keys.
func TestHazard08_NothingRunsAfterRevoke(t *testing.T) {
	for i, end := range []func(m *Memory){func(m *Memory) { m.Node.Revoke(5) }, func(m *Memory) { m.Open(2) }, (*Memory).Close} {
		f, m, c, to := fabricOf(uint64(i), DRAM)
		var r rdma.Round
		ch := r.Chain(to)
		ch.Write(0, make([]byte, 4096))
		ch.CAS(8192, 0, 9)
		c.Post(ch)
		end(m)
		for f.StepAny() {
		}
		require.ErrorIs(t, ch.Err, rdma.ErrRefused)
		require.Zero(t, m.Word(8192))
	}
}

// TestPowerLossKeepsWhatWasFlushed, at the grain of 8 bytes.
func TestPowerLossKeepsWhatWasFlushed(t *testing.T) {
	for _, p := range []Profile{DRAM, ADRDDIOOn, ADRDDIOOff, EADR} {
		kept, lost := 0, 0
		for seed := range uint64(100) {
			f, m, _, to := fabricOf(seed, p)
			var r rdma.Round
			c := r.Chain(to)
			c.Write(0, []byte("flushed!"))
			if p != DRAM {
				c.Flush(rdma.Persistent, 0, 8)
			}
			c.Write(64, []byte("unflushd"))
			rdma.Do(&r)
			require.NoError(t, r.Err())
			m.Node.Crash()
			m.PowerLoss(f.Choose)
			if p != DRAM {
				require.NotZero(t, m.Word(0))
			} else {
				require.Zero(t, m.Word(0))
			}
			if m.Word(64) != 0 {
				kept++
			} else {
				lost++
			}
		}
		switch p {
		case EADR:
			require.Zero(t, lost)
		case DRAM:
			require.Zero(t, kept)
		default:
			require.NotZero(t, kept)
			require.NotZero(t, lost)
		}
	}
}

// TestHazard34_AcrossDomains: a CAS through another domain is not atomic, and such
// an opening is refused.
func TestHazard34_AcrossDomains(t *testing.T) {
	f, m, _, to := fabricOf(1, DRAM)
	other, err := f.Dial(6, m.Node)
	require.NoError(t, err)
	other.Foreign()
	_, err = other.Open(context.Background(), 1, 1)
	require.ErrorIs(t, err, rdma.ErrRefused)
	f.CrossDomain = true // what if it were not
	w, err := other.Open(context.Background(), 1, 1)
	require.NoError(t, err)
	both := 0
	for range 200 {
		m.Set(0, 0)
		to2 := &rdma.Target{Conn: other, Window: w}
		var r rdma.Round
		r.Chain(to).CAS(0, 0, 1)
		r.Chain(to2).CAS(0, 0, 2)
		rdma.Do(&r)
		if r.At(0).Verbs[0].Old == 0 && r.At(1).Verbs[0].Old == 0 {
			both++
		}
	}
	require.NotZero(t, both, "two owners of one word")
	require.Equal(t, proto.DomainCPU, m.Domain)
}
