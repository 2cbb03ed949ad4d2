package vmm_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/client/vmm"
)

func init() {
	programs["counter"] = counterProgram
	programs["random"] = randomProgram
}

// counterProgram adds 1 to plain words of several pages under a lock that all hosts share: a word of the space.
func counterProgram(p *program) error {
	const lock, data, pages = 0, 1, 3 // pages
	base := p.s.Base()
	m, err := vmm.Map(p.ctx, p.s, base+data*page, pages*page, vmm.Release, p.o)
	if err != nil {
		return err
	}
	w := words(m)
	p.say("mapped")
	p.hear()
	for range p.arg(0) {
		for {
			_, mine, err := p.s.CAS64(p.ctx, base+lock*page, 0, 1)
			if err != nil {
				return err
			}
			if mine {
				break
			}
		}
		if _, err := m.Acquire(p.ctx, m.Base(), pages*page); err != nil {
			return err
		}
		for i := range pages {
			x := &w[i*page/8+i]
			x.Store(x.Load() + 1)
		}
		if err := m.Release(p.ctx, m.Base(), pages*page); err != nil {
			return err
		}
		if err := p.s.Store64(p.ctx, base+lock*page, 0); err != nil {
			return err
		}
	}
	return m.Close()
}

// TestEntryConsistency: programs on two hosts count in plain memory under a lock.
func TestEntryConsistency(t *testing.T) {
	const rounds = 150
	k := newKit(t, 2)
	s := k.space("counter", mib, space.Options{Replicas: 2})
	hosts := []*host{k.host(), k.host()}
	var children []*child
	for i := range 3 { // two programs share a host
		children = append(children, hosts[i%2].start("counter", s, nil, strconv.Itoa(rounds)))
		require.Equal(t, "mapped", children[i].hear())
	}
	for _, c := range children {
		c.say("go")
	}
	for _, c := range children {
		c.wait()
	}
	all := values(t, s)
	for i := range 3 {
		require.EqualValues(t, 3*rounds, all[(1+i)*page/8+i])
	}
}

// TestAcquireDropsWhatDiffers, and nothing else: pages that are as in the space stay, and so do dirty ones.
func TestAcquireDropsWhatDiffers(t *testing.T) {
	k := newKit(t, 1)
	h := k.host()
	s := k.space("differs", mib, space.Options{})
	m, err := vmm.Map(t.Context(), s, s.Base(), 8*page, vmm.Release, h.options())
	require.NoError(t, err)
	defer m.Close()
	b := m.Bytes()
	require.NoError(t, m.Prefetch(t.Context(), m.Base(), 8*page))
	require.Equal(t, 8, h.metric("quarry_pager_pages"))
	b[5*page] = 'x'
	for _, p := range []int64{2, 5} {
		_, err = s.WriteAt([]byte("elsewhere"), int64(s.Base())+p*page)
		require.NoError(t, err)
	}
	require.Zero(t, b[2*page], "not acquired")
	dropped, err := m.Acquire(t.Context(), m.Base(), 8*page)
	require.NoError(t, err)
	require.Equal(t, 1, dropped)
	require.Equal(t, "elsewhere", string(b[2*page:2*page+9]))
	require.EqualValues(t, 'x', b[5*page], "a store of this host that it has not released")
	dropped, err = m.Acquire(t.Context(), m.Base(), 8*page)
	require.NoError(t, err)
	require.Zero(t, dropped)
}

// TestPrivate: stores are the mapping's own; loads see the space as it was when the page was read.
func TestPrivate(t *testing.T) {
	k := newKit(t, 1)
	h := k.host("--memory", "1MiB")
	s := k.space("private", 4*mib, space.Options{})
	_, err := s.WriteAt([]byte("the space's"), int64(s.Base()))
	require.NoError(t, err)
	m, err := vmm.Map(t.Context(), s, s.Base(), s.Bytes(), vmm.Private, h.options())
	require.NoError(t, err)
	b := m.Bytes()
	require.Equal(t, "the space's", string(b[:11]))
	copy(b, "mine")
	for i := page; i < len(b); i += page { // more than the pager keeps
		b[i] = 1
	}
	require.Equal(t, "mine", string(b[:4]))
	require.EqualValues(t, 1, b[len(b)-page])
	require.Zero(t, h.metric("quarry_pager_dirty_pages"))
	require.LessOrEqual(t, h.metric("quarry_pager_pages"), 256)
	require.ErrorIs(t, m.Sync(t.Context(), m.Base(), page), client.ErrArgument)
	require.ErrorIs(t, m.Release(t.Context(), m.Base(), page), client.ErrArgument)
	require.NoError(t, m.Close())
	all := values(t, s)
	require.Equal(t, uint64('t'), all[0]&0xff)
	require.Zero(t, all[page/8])
}

// TestBudget: a space that is sixteen times as large as the pager's memory is stored into and loaded in sequence, with read-ahead.
func TestBudget(t *testing.T) {
	k := newKit(t, 1)
	h := k.host("--memory", "4MiB")
	s := k.space("large", 64*mib-mib, space.Options{RegionBytes: 7 * mib})
	m, err := vmm.Map(t.Context(), s, s.Base(), s.Bytes(), vmm.Release, h.options())
	require.NoError(t, err)
	w := words(m)
	for at := 0; at < len(w); at += page / 8 {
		w[at].Store(uint64(at + 1))
	}
	require.LessOrEqual(t, h.metric("quarry_pager_pages"), 1024)
	for at := 0; at < len(w); at += page / 8 {
		require.EqualValues(t, at+1, w[at].Load())
		require.Zero(t, w[at+1].Load())
	}
	require.LessOrEqual(t, h.metric("quarry_pager_pages"), 1024)
	require.Positive(t, h.metric("quarry_pager_read_ahead_pages_total"))
	require.NoError(t, m.Close())
	all := values(t, s)
	for at := 0; at < len(all); at += page / 8 {
		require.EqualValues(t, at+1, all[at])
	}
}

// TestLargeSpace: 256 MiB on 1 MiB of memory, in which pages are touched that are far from each other.
func TestLargeSpace(t *testing.T) {
	k := newKit(t, 1)
	h := k.host("--memory", "1MiB")
	s := k.space("huge", 256*mib, space.Options{RegionBytes: 64 * mib})
	m, err := vmm.Map(t.Context(), s, s.Base(), s.Bytes(), vmm.Release, h.options())
	require.NoError(t, err)
	w := words(m)
	touch := func(check bool) {
		rng := rand.New(rand.NewPCG(1, 2))
		for n := range 2000 {
			x := &w[rng.IntN(len(w))]
			if check {
				require.EqualValues(t, n+1, x.Load())
			} else {
				x.Store(uint64(n + 1))
			}
		}
	}
	touch(false)
	touch(true)
	require.LessOrEqual(t, h.metric("quarry_pager_pages"), 256)
	require.NoError(t, m.Close())
}

// randomProgram stores into and loads random words until it is told to stop, and prints how many accesses it has made. Its stores rise.
func randomProgram(p *program) error {
	m, err := p.mapAll()
	if err != nil {
		return err
	}
	stop := make(chan struct{})
	go func() {
		p.hear()
		close(stop)
	}()
	p.say("mapped")
	w := words(m)
	model := map[int]uint64{}
	rng := rand.New(rand.NewPCG(3, 4))
	for n := uint64(1); ; n++ {
		i := rng.IntN(len(w))
		err := m.Do(func() {
			if v := w[i].Load(); v != model[i] {
				err = errors.Join(err, fmt.Errorf("access %d: word %d is %d, not %d", n, i, v, model[i]))
			}
			w[i].Store(n)
			model[i] = n
		})
		if err != nil {
			return err
		}
		if n%300 == 0 {
			p.say("goes on")
		}
		select {
		case <-stop:
			for i, v := range model {
				if got := w[i].Load(); got != v {
					return fmt.Errorf("word %d is %d, not %d", i, got, v)
				}
			}
			return m.Close()
		default:
		}
	}
}

// TestFailoverUnderFaults: a node of two is killed while a program faults and pages are written back to make room, and started again; then the other one.
func TestFailoverUnderFaults(t *testing.T) {
	k := newKit(t, 2)
	h := k.host("--memory", "1MiB")
	s := k.space("failover", 4*mib, space.Options{RegionBytes: mib, Replicas: 2})
	c := h.start("random", s, nil)
	require.Equal(t, "mapped", c.hear())
	for _, name := range []string{"n1", "n2"} {
		for range 3 {
			require.Equal(t, "goes on", c.hear())
		}
		k.cluster.Process(name).Kill()
		for range 3 { // without the node
			require.Equal(t, "goes on", c.hear())
		}
		require.NoError(t, k.cluster.Restart(t.Context(), name))
		require.Eventually(t, func() bool { return k.inSync(2) }, patience, 50*time.Millisecond, "the node's replicas are rebuilt")
	}
	c.say("stop")
	c.wait()
}
