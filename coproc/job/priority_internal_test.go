package job

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Lower priorities get the parts that the rule says, and no more: none of them is starved.
func TestPrecedence(t *testing.T) {
	run := func(jobs []active, n int) string {
		var q turns
		var said strings.Builder
		for range n {
			j := q.order(jobs)[0]
			q.took(j, true, jobs)
			said.WriteString([]string{"h", "n", "l"}[j.class] + string(rune('0'+j.id)))
		}
		return said.String()
	}
	h, n, l := active{1, High.class()}, active{2, Normal.class()}, active{3, Low.class()}
	require.Equal(t, strings.Repeat(strings.Repeat("h1", 8)+"n2l3", 3), run([]active{h, n, l}, 30))
	require.Equal(t, strings.Repeat(strings.Repeat("n2", 8)+"l3", 2), run([]active{n, l}, 18))
	require.Equal(t, "l3l3l3", run([]active{l}, 3))
	// Those of one priority take turns.
	require.Equal(t, strings.Repeat("h1h4", 4)+"l3h1h4", run([]active{h, l, {4, High.class()}}, 11))

	// A job that has nothing to begin is looked at first, once it was passed over, and comes first as soon as it has.
	var q turns
	jobs := []active{h, l}
	for range 20 {
		q.took(h, true, jobs)
	}
	require.Equal(t, []active{l, h}, q.order(jobs))
	q.took(l, true, jobs)
	require.Equal(t, []active{h, l}, q.order(jobs))

	require.Equal(t, classNormal, Priority("urgent").class())
	require.Equal(t, classNormal, Priority("").class())
	require.Equal(t, "normal", Priority("").String())
}

// The slots of a process that serves several tenants go to the tenants in turn, and within a tenant by priority.
func TestSlotsGoToTenantsInTurn(t *testing.T) {
	d := newDesk(1)
	require.True(t, d.take(t.Context(), nil, "a", classNormal)) // the slot is taken
	got := make(chan string)
	waits := func(tenant string, p Priority) {
		d.mu.Lock()
		before := len(d.waiting)
		d.mu.Unlock()
		go func() {
			if d.take(t.Context(), nil, tenant, p.class()) {
				got <- tenant + " " + p.String()
			}
		}()
		require.Eventually(t, func() bool {
			d.mu.Lock()
			defer d.mu.Unlock()
			return len(d.waiting) > before
		}, 3*time.Minute, time.Millisecond)
	}
	for _, p := range []Priority{Low, Normal, High} {
		waits("a", p)
	}
	waits("b", Low)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.False(t, d.take(ctx, nil, "c", classNormal), "one that does not wait any more gets none")
	var order []string
	for range 4 {
		d.give()
		order = append(order, <-got)
	}
	require.Equal(t, []string{"b low", "a high", "a normal", "a low"}, order)
	d.give()
	require.Equal(t, 1, d.free)
	require.Empty(t, d.waiting)
}
