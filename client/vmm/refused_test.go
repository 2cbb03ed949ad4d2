package vmm_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/client/vmm"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/internal/pagerlink"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// command runs the command line and returns what it says.
func (k *kit) command(args ...string) (string, error) {
	cmd := exec.CommandContext(k.Context(), k.quarry, args...)
	cmd.Env = append(os.Environ(), "QUARRY_CONTROLLER="+k.cluster.URL)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestRefused: bad input is named, and changes nothing.
func TestRefused(t *testing.T) {
	ctx := t.Context()
	k := newKit(t, 1)
	h := k.host()
	s := k.space("s", 2*mib, space.Options{RegionBytes: mib})
	base := s.Base()

	for name, bad := range map[string]struct {
		va, n uint64
		mode  vmm.Mode
		is    error
		says  string
	}{
		"before the space":    {base - page, page, vmm.Release, space.ErrAddress, "0x100000000000 to 0x100000200000"},
		"behind it":           {base + 2*mib, page, vmm.Release, space.ErrAddress, "space \"s\""},
		"over its end":        {base + mib, 2 * mib, vmm.Release, space.ErrAddress, "space \"s\""},
		"address wraps round": {1<<64 - page, 2 * page, vmm.Release, client.ErrArgument, ""},
		"no pages":            {base, 0, vmm.Release, client.ErrArgument, "whole pages"},
		"half a page":         {base, page / 2, vmm.Release, client.ErrArgument, "whole pages of 4096 bytes"},
		"within a page":       {base + 8, page, vmm.Release, client.ErrArgument, "whole pages"},
		"no mode":             {base, page, "", client.ErrArgument, "want release or private"},
		"exclusive":           {base, page, "exclusive", client.ErrArgument, "checksummed pages"},
		"direct":              {base, page, "direct", client.ErrArgument, "use release"},
	} {
		_, err := vmm.Map(ctx, s, bad.va, bad.n, bad.mode, h.options())
		require.ErrorIs(t, err, bad.is, name)
		require.ErrorContains(t, err, bad.says, name)
	}

	m, err := vmm.Map(ctx, s, base+4*page, 4*page, vmm.Release, h.options())
	require.NoError(t, err)
	defer m.Close()
	_, err = vmm.Map(ctx, s, base, 5*page, vmm.Release, h.options())
	require.ErrorIs(t, err, vmm.ErrMapped)
	require.ErrorContains(t, err, "must not overlap")
	for _, r := range [][2]uint64{{base, page}, {base + 8*page, 1}, {base + 4*page, 5 * page}, {base + 7*page, 1<<64 - 1}} {
		require.ErrorIs(t, m.Sync(ctx, r[0], r[1]), space.ErrAddress)
		require.ErrorIs(t, m.Release(ctx, r[0], r[1]), space.ErrAddress)
		require.ErrorIs(t, m.Prefetch(ctx, r[0], r[1]), space.ErrAddress)
		_, err := m.Acquire(ctx, r[0], r[1])
		require.ErrorIs(t, err, space.ErrAddress)
	}
	// The rest of the space can be mapped beside it, and what was refused has left nothing.
	other, err := vmm.Map(ctx, s, base, 4*page, vmm.Release, h.options())
	require.NoError(t, err)
	require.NoError(t, other.Close())
	require.ErrorIs(t, other.Close(), client.ErrArgument)
	require.ErrorIs(t, other.Sync(ctx, base, page), client.ErrArgument)
	require.Eventually(t, func() bool { return h.metric("quarry_pager_mappings") == 1 }, patience, 10*time.Millisecond)

	// A fault of something else is no concern of Do.
	require.PanicsWithValue(t, "mine", func() { _ = m.Do(func() { panic("mine") }) })
}

// TestRefusedPagers: of another tenant, of another cluster, a second one, none, and one with too little memory.
func TestRefusedPagers(t *testing.T) {
	ctx := t.Context()
	k := newKit(t, 1)
	h := k.host()
	s := k.space("s", mib, space.Options{})

	_, err := k.command("pager", "--socket", h.socket)
	require.Error(t, err)
	out, err := k.command("pager", "--socket", h.socket)
	require.Error(t, err)
	require.Contains(t, out, "another pager")
	require.Contains(t, out, "--socket")
	out, err = k.command("pager", "--memory", "100KiB")
	require.Error(t, err)
	require.Contains(t, out, "--memory 102400: want 1.0 MiB or more")
	out, err = k.command("pager", "--read-ahead", "3MiB")
	require.Error(t, err)
	require.Contains(t, out, "--read-ahead")

	_, err = vmm.Map(ctx, s, s.Base(), mib, vmm.Release, vmm.Options{Socket: h.socket + ".none", Command: []string{}})
	require.ErrorIs(t, err, vmm.ErrNoPager)
	require.ErrorContains(t, err, "start quarry pager")
	_, err = vmm.Map(ctx, s, s.Base(), mib, vmm.Release, vmm.Options{Socket: h.socket + ".none", Command: []string{h.socket + ".no-program"}})
	require.ErrorIs(t, err, vmm.ErrNoPager)
	_, err = vmm.Map(ctx, s, s.Base(), mib, vmm.Release, vmm.Options{Socket: h.socket + ".none", Command: []string{k.quarry, "pager", "--controller", "http://127.0.0.1:1", "--timeout", "1s"}})
	require.ErrorIs(t, err, vmm.ErrNoPager)
	require.ErrorContains(t, err, "127.0.0.1:1")

	out, err = k.command("tenant", "create", "other")
	require.NoError(t, err, out)
	theirs, err := client.Connect(ctx, client.Config{Controllers: []string{k.cluster.URL}, Tenant: "other", Timeout: patience})
	require.NoError(t, err)
	defer theirs.Close()
	same, err := space.Create(ctx, theirs, "s", mib, space.Options{})
	require.NoError(t, err)
	_, err = vmm.Map(ctx, same, same.Base(), mib, vmm.Release, h.options())
	require.ErrorIs(t, err, client.ErrArgument)
	require.ErrorContains(t, err, "tenant")

	elsewhere, err := local.Start(ctx, local.Config{Binary: k.quarry, Nodes: 1, RegionBytes: "64MiB", Lease: "30s"})
	require.NoError(t, err)
	defer elsewhere.Stop()
	far, err := client.Connect(ctx, client.Config{Controllers: []string{elsewhere.URL}, Timeout: patience})
	require.NoError(t, err)
	defer far.Close()
	same, err = space.Create(ctx, far, "s", mib, space.Options{})
	require.NoError(t, err)
	_, err = vmm.Map(ctx, same, same.Base(), mib, vmm.Release, h.options())
	require.ErrorIs(t, err, client.ErrArgument)
	require.ErrorContains(t, err, "another cluster")

	// A space that was deleted and made again is another one.
	require.NoError(t, space.Delete(ctx, k.c, "s"))
	again := k.space("s", mib, space.Options{})
	_, err = vmm.Map(ctx, s, s.Base(), mib, vmm.Release, h.options())
	require.ErrorIs(t, err, client.ErrArgument)
	require.ErrorContains(t, err, "made again")
	m, err := vmm.Map(ctx, again, again.Base(), mib, vmm.Release, h.options())
	require.NoError(t, err)
	require.NoError(t, m.Close())
}

// TestReadOnly: a pager that may only read gives memory that cannot be stored into.
func TestReadOnly(t *testing.T) {
	k := newKit(t, 1)
	h := k.host("--read-only")
	s := k.space("s", mib, space.Options{})
	_, err := s.WriteAt([]byte("text"), int64(s.Base()))
	require.NoError(t, err)
	m, err := vmm.Map(t.Context(), s, s.Base(), mib, vmm.Release, h.options())
	require.NoError(t, err)
	require.True(t, m.ReadOnly())
	require.Equal(t, "text", string(m.Bytes()[:4]))
	require.ErrorIs(t, m.Sync(t.Context(), m.Base(), page), client.ErrReadOnly)
	require.Error(t, m.Do(func() { m.Bytes()[0] = 1 }))
	require.NoError(t, m.Close())
}

// TestSpaceIsDeleted: accesses that need the space fail with a reason, each by itself, and others go on.
func TestSpaceIsDeleted(t *testing.T) {
	ctx := t.Context()
	k := newKit(t, 1)
	h := k.host("--fault-timeout", "10s")
	s := k.space("deleted", mib, space.Options{})
	m, err := vmm.Map(ctx, s, s.Base(), mib, vmm.Release, h.options())
	require.NoError(t, err)
	m.Bytes()[0] = 1
	require.NoError(t, space.Delete(ctx, k.c, "deleted"))
	for range 2 { // a later access tries again
		var err error
		require.Eventually(t, func() bool { // nodes give the memory back behind the answer
			page5 := m.Bytes()[5*page:]
			err = m.Do(func() { _ = page5[0]; sink = page5[1] })
			_, _ = m.Acquire(ctx, m.Base()+5*page, page)
			return err != nil
		}, patience, 10*time.Millisecond)
		require.ErrorContains(t, err, "0x1000000050")
		require.ErrorContains(t, err, "space \"deleted\"")
	}
	require.NoError(t, m.Err(), "the mapping is not lost")
	require.EqualValues(t, 1, m.Bytes()[0])
	require.Error(t, m.Sync(ctx, m.Base(), page))
	require.Error(t, m.Close())
	require.Eventually(t, func() bool { return h.metric("quarry_pager_pages") == 0 }, patience, 10*time.Millisecond, "stores into a space that is gone are dropped")
}

var sink byte

// TestStartedOnDemand: programs that find no pager start one, together, and it ends when it has been idle.
func TestStartedOnDemand(t *testing.T) {
	k := newKit(t, 1)
	s := k.space("s", mib, space.Options{})
	t.Setenv("QUARRY_CONTROLLER", k.cluster.URL)
	t.Setenv("PATH", filepath.Dir(k.quarry)+":"+os.Getenv("PATH"))
	socket := filepath.Join(t.TempDir(), "pager")
	results := make(chan error, 3)
	var maps [3]*vmm.Mapping
	for i := range maps {
		go func() {
			var err error
			maps[i], err = vmm.Map(context.Background(), s, s.Base()+uint64(i)*page, page, vmm.Release, vmm.Options{Socket: socket, Command: []string{"quarry", "pager", "--idle", "1s"}})
			results <- err
		}()
	}
	for range maps {
		require.NoError(t, <-results)
	}
	pids := map[int]bool{}
	for _, m := range maps {
		pids[m.Pager()] = true
		m.Bytes()[0] = 1
		require.NoError(t, m.Close())
	}
	require.Len(t, pids, 1)
	require.Eventually(t, func() bool {
		link, err := pagerlink.Dial(socket)
		if err == nil {
			link.Close()
		}
		return err != nil
	}, patience, 50*time.Millisecond, "it ends when nothing is mapped")
}

// TestContextsThatHaveEnded: no call does anything then.
func TestContextsThatHaveEnded(t *testing.T) {
	k := newKit(t, 1)
	h := k.host()
	s := k.space("s", mib, space.Options{})
	m, err := vmm.Map(t.Context(), s, s.Base(), mib, vmm.Release, h.options())
	require.NoError(t, err)
	defer m.Close()
	testcluster.ContextCalls(t, []any{m}, map[string]func(context.Context) error{
		"Map": func(ctx context.Context) error {
			_, err := vmm.Map(ctx, s, s.Base(), mib, vmm.Release, h.options())
			return err
		},
	}, s.Base(), uint64(mib))
}
