package vmm_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/client/vmm"
	"github.com/quarrystore/quarry/verify/teststop"
)

func init() {
	programs["victim"] = victimProgram
	programs["stuck"] = stuckProgram
	programs["storer"] = storerProgram
}

// fill gives all words of the pages of a mapping one value.
func fill(m *vmm.Mapping, value uint64) {
	w := plainWords(m)
	for i := range w {
		w[i] = value
	}
}

// victimProgram stores 1 everywhere and syncs, then stores 2 and 3 and so on until its pager is gone.
func victimProgram(p *program) error {
	m, err := p.mapAll()
	if err != nil {
		return err
	}
	fill(m, 1)
	if err := m.Sync(p.ctx, m.Base(), p.s.Bytes()); err != nil {
		return err
	}
	p.say("synced")
	for v := uint64(2); ; v++ {
		if err := m.Do(func() { fill(m, v) }); err != nil {
			fmt.Println(v)
			return lostWell(m, err)
		}
	}
}

// lostWell checks what a program sees whose pager is gone.
func lostWell(m *vmm.Mapping, err error) error {
	for _, want := range []error{err, m.Err(), m.Sync(context.Background(), m.Base(), 8), m.Do(func() { m.Bytes()[0] = 1 })} {
		if !errors.Is(want, vmm.ErrLost) || !strings.Contains(want.Error(), strconv.Itoa(m.Pager())) {
			return fmt.Errorf("not the loss of pager %d: %w", m.Pager(), want)
		}
	}
	if err := m.Close(); !errors.Is(err, vmm.ErrLost) {
		return fmt.Errorf("closing a lost mapping: %w", err)
	}
	fmt.Println("lost")
	return nil
}

// stuckProgram waits for pages of a pager that does not answer, in copies in which goroutines cannot be stopped, while the garbage collector
// waits for them: none of its own goroutines can run, so that the guard alone can end it.
func stuckProgram(p *program) error {
	m, err := p.mapAll()
	if err != nil {
		return err
	}
	m.Bytes()[0] = 1
	p.say("mapped")
	p.hear()
	results := make(chan error)
	for i := range runtime.GOMAXPROCS(0) {
		go func() {
			buf := make([]byte, 2*page)
			results <- m.Do(func() { copy(buf, m.Bytes()[(2*i+1)*page:]) })
		}()
	}
	go func() {
		for {
			runtime.GC()
		}
	}()
	p.say("copying")
	for range runtime.GOMAXPROCS(0) {
		if err = <-results; err == nil {
			return errors.New("a copy of pages that are not there has ended")
		}
	}
	return lostWell(m, err)
}

// storerProgram stores its argument into every word, and syncs, each when the test says so.
func storerProgram(p *program) error {
	m, err := p.mapAll()
	if err != nil {
		return err
	}
	for {
		switch what := p.hear(); what {
		case "store":
			fill(m, uint64(p.arg(0)))
		case "sync":
			if err := m.Sync(p.ctx, m.Base(), p.s.Bytes()); err != nil {
				return err
			}
		case "close", "":
			return m.Close()
		}
		p.say("done")
	}
}

// values are the words of a space.
func values(t *testing.T, s *space.Space) []uint64 {
	b := make([]byte, s.Bytes())
	_, err := s.Read(t.Context(), b, s.Base())
	require.NoError(t, err)
	out := make([]uint64, len(b)/8)
	for i := range out {
		out[i] = binary.LittleEndian.Uint64(b[8*i:])
	}
	return out
}

// TestPagerIsKilled: the program gets SIGBUS, as an error with the reason; what it had synced is in the space, and every word is one that was stored.
func TestPagerIsKilled(t *testing.T) {
	k := newKit(t, 1)
	for i, end := range []func(h *host){
		func(h *host) { h.pager.Kill() },
		func(h *host) { require.NoError(h, h.pager.Stop(), "%s", h.pager.Log()) },
		func(h *host) { // with its guard: the program's own goroutine ends the mapping
			h.stop()
			require.NoError(h, syscall.Kill(guardOf(h, h.pager.PID()), syscall.SIGKILL))
			h.pager.Kill()
		},
	} {
		h := k.host("--memory", "1MiB")
		s := k.space("killed"+strconv.Itoa(i), 2*mib, space.Options{})
		v := h.start("victim", s, nil)
		require.Equal(t, "synced", v.hear())
		require.Eventually(t, func() bool { return values(t, s)[0] > 2 }, patience, 10*time.Millisecond, "pages are written back to make room")
		end(h)
		last, end, _ := strings.Cut(v.wait(), "\n")
		require.Equal(t, "lost\n", end)
		stored, err := strconv.ParseUint(last, 10, 64)
		require.NoError(t, err)
		for at, value := range values(t, s) {
			require.True(t, value >= 1 && value <= stored, "word %d is %d, and 1 to %d were stored", at, value, stored)
		}
	}
}

// TestPagerThatHangsIsKilled: accesses that wait for it end.
func TestPagerThatHangsIsKilled(t *testing.T) {
	k := newKit(t, 1)
	h := k.host()
	s := k.space("hangs", 2*mib, space.Options{})
	c := h.start("stuck", s, nil)
	require.Equal(t, "mapped", c.hear())
	h.stop()
	c.say("go")
	require.Equal(t, "copying", c.hear())
	h.pager.Kill()
	require.Equal(t, "lost\n", c.wait())
	require.Zero(t, values(t, s)[0], "not synced")
}

// TestGuardIsKilled: the pager writes back what is dirty, and ends with a reason.
func TestGuardIsKilled(t *testing.T) {
	k := newKit(t, 1)
	h := k.host()
	s := k.space("unguarded", mib, space.Options{})
	c := h.start("storer", s, nil, "5")
	c.say("store")
	require.Equal(t, "done", c.hear())
	require.NoError(t, syscall.Kill(guardOf(t, h.pager.PID()), syscall.SIGKILL))
	state := h.pager.Wait()
	require.Equal(t, 1, state.ExitCode(), "%s", h.pager.Log())
	require.Contains(t, h.pager.Log(), "guard")
	require.EqualValues(t, 5, values(t, s)[17])
	c.kill()
}

// stop stops the pager.
func (h *host) stop() { require.NoError(h, teststop.Stop(h.pager.PID())) }

// guardOf is the child process of a pager.
func guardOf(t testing.TB, pager int) int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pager, pager))
	require.NoError(t, err)
	var pid int
	for _, dir := range strings.Fields(string(b)) {
		pid, err = strconv.Atoi(dir)
		require.NoError(t, err)
	}
	if pid == 0 { // another thread has started it
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pager))
		require.NoError(t, err)
		for _, thread := range threads {
			b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pager, thread.Name()))
			require.NoError(t, err)
			if f := strings.Fields(string(b)); len(f) > 0 {
				pid, err = strconv.Atoi(f[0])
				require.NoError(t, err)
			}
		}
	}
	require.NotZero(t, pid)
	return pid
}

// TestProgramIsKilled: its stores are in the memory that the programs of the host share, and so another program sees them, and the space has
// them when the last mapping has ended.
func TestProgramIsKilled(t *testing.T) {
	k := newKit(t, 1)
	h := k.host()
	s := k.space("survives", mib, space.Options{})
	m, err := vmm.Map(t.Context(), s, s.Base(), s.Bytes(), vmm.Release, h.options())
	require.NoError(t, err)
	c := h.start("storer", s, nil, "7")
	c.say("store")
	require.Equal(t, "done", c.hear())
	c.kill()
	require.NoError(t, m.Do(func() {
		for i := range words(m) {
			require.EqualValues(t, 7, words(m)[i].Load())
		}
		words(m)[3].Store(8)
	}))
	require.Eventually(t, func() bool { return h.metric("quarry_pager_mappings") == 1 }, patience, 10*time.Millisecond)
	require.Eventually(t, func() bool { return values(t, s)[0] == 7 }, patience, 10*time.Millisecond, "written back, although the space is still mapped")
	require.NoError(t, m.Close())
	for i, v := range values(t, s) {
		require.EqualValues(t, map[bool]int{true: 8, false: 7}[i == 3], v)
	}

	// The last program of a space is killed: the pager writes its stores.
	c = h.start("storer", s, nil, "9")
	c.say("store")
	require.Equal(t, "done", c.hear())
	c.kill()
	require.Eventually(t, func() bool { return values(t, s)[len(values(t, s))-1] == 9 }, patience, 10*time.Millisecond)
	require.Eventually(t, func() bool { return h.metric("quarry_pager_pages") == 0 }, patience, 10*time.Millisecond, "nothing is kept of a space that is not mapped")
}
