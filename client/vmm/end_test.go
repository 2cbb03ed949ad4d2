package vmm_test

import (
	"context"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/client/vmm"
	"github.com/quarrystore/quarry/internal/pagerlink"
	"github.com/quarrystore/quarry/verify/teststop"
)

// hang stops a node, which answers no verb over tcp then, until the returned function is called, or the test ends.
func (k *kit) hang(node string) (goOn func()) {
	p := k.cluster.Process(node)
	require.NoError(k, teststop.Stop(p.PID()))
	goOn = func() { require.NoError(k, p.Signal(syscall.SIGCONT)) }
	k.Cleanup(goOn)
	return goOn
}

// TestNextPagerWaits: no other pager serves the socket while the one before it still writes back. It would read pages without stores that programs of the host
// have seen, and its own stores would be overwritten.
func TestNextPagerWaits(t *testing.T) {
	ctx := t.Context()
	k := newKit(t, 1)
	h := k.host("--transport", "tcp")
	s := k.space("s", mib, space.Options{})
	m, err := vmm.Map(ctx, s, s.Base(), mib, vmm.Release, h.options())
	require.NoError(t, err)
	require.NoError(t, m.Do(func() { m.Bytes()[0] = 9 }))
	goOn := k.hang("n1")
	require.NoError(t, h.pager.Signal(syscall.SIGTERM))
	require.Eventually(t, func() bool {
		_, err := os.Lstat(h.socket)
		return os.IsNotExist(err)
	}, patience, time.Millisecond)
	short, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel()
	_, err = pagerlink.Listen(short, h.socket)
	require.ErrorIs(t, err, pagerlink.ErrRunning)
	require.ErrorContains(t, err, "still writes pages back")
	require.False(t, h.pager.Ended())
	goOn()
	require.Zero(t, h.pager.Wait().ExitCode(), "%s", h.pager.Log())
	l, err := pagerlink.Listen(ctx, h.socket)
	require.NoError(t, err)
	require.NoError(t, l.Close())
	require.EqualValues(t, 9, values(t, s)[0])
	require.ErrorIs(t, m.Close(), vmm.ErrLost)
}

// TestPrefetchEnds: where no page can be written back to make room, a Prefetch ends within the pager's time for a call, and does not say that it has read the
// pages.
func TestPrefetchEnds(t *testing.T) {
	k := newKit(t, 1)
	h := k.host("--transport", "tcp", "--memory", "1MiB", "--fault-timeout", "5s")
	s := k.space("s", 16*mib, space.Options{})
	m, err := vmm.Map(t.Context(), s, s.Base(), 16*mib, vmm.Release, h.options())
	require.NoError(t, err)
	require.NoError(t, m.Do(func() {
		for at := mib/page - 1; at >= 0; at-- { // downwards nothing is read ahead
			m.Bytes()[at*page] = 1
		}
	}))
	require.Equal(t, mib/page, h.metric("quarry_pager_dirty_pages"))
	goOn := k.hang("n1")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	err = m.Prefetch(ctx, s.Base()+8*mib, 8*mib)
	require.ErrorContains(t, err, "pager")
	require.NoError(t, ctx.Err())
	goOn()
	require.Eventually(t, func() bool { return m.Sync(t.Context(), s.Base(), mib) == nil }, patience, 10*time.Millisecond, "the pages are kept until they can be written")
	require.NoError(t, m.Close())
	require.EqualValues(t, 1, values(t, s)[0])
}
