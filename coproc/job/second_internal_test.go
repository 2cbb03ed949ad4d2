package job

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// Second attempts count against the job's budget for themselves alone, until one has become the part's own.
func TestSecondAttemptsAreInNoBudgetOfOthers(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Lease: 30 * time.Second}).Connect(client.Config{})
	store, err := Open(ctx, c)
	require.NoError(t, err)
	w := &worker{c: c, store: store}
	ref, err := c.Alloc(ctx, []byte("run"), client.AllocOptions{WriteOnce: true})
	require.NoError(t, err)
	const budget = 100
	first := w.written(ctx, &Part{Job: 1, Phase: phaseMap, Attempt: 1}, budget)
	require.NoError(t, first.add(ref, 60))
	second := w.written(ctx, &Part{Job: 1, Phase: phaseMap, Attempt: 1, second: true}, budget)
	require.NoError(t, second.add(ref, 30))
	other := w.written(ctx, &Part{Job: 1, Phase: phaseMap, Index: 1, Attempt: 1}, budget)
	require.NoError(t, other.add(ref, 40), "the job has not more than its budget")
	require.ErrorIs(t, second.check(), errBudget, "with the second attempt it has")
	first.release(ctx)
	require.NoError(t, second.check())
	require.NoError(t, second.count(ctx))
	require.NoError(t, other.check())
	require.ErrorIs(t, other.add(ref, 40), errBudget, "the part's own attempt counts")
	require.NoError(t, w.dropManifests(ctx, 1))
}

// A part's own attempt whose change was carried out without an answer finds it, whatever its second attempt has recorded since; and it loses nothing
// that its second attempt has recorded.
func TestSecondAttemptsChangeTheirOwnFieldAlone(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Lease: 30 * time.Second}).Connect(client.Config{})
	store, err := Open(ctx, c)
	require.NoError(t, err)
	_, mine, err := c.Bind(ctx)
	require.NoError(t, err)
	p := &Part{Job: 1, Phase: phaseMap, State: Running, Attempt: 1, Session: mine}
	require.NoError(t, store.t.PutIfAbsent(ctx, partKey(1, phaseMap, 0), encode(p)))
	p, err = store.part(ctx, p)
	require.NoError(t, err)
	change := func(f func(now *Part)) *Part {
		now, err := store.part(ctx, p)
		require.NoError(t, err)
		f(now)
		require.NoError(t, store.swapPart(ctx, now))
		return now
	}
	change(func(now *Part) {
		now.Second = &Second{Worker: "b", Session: client.Session{Number: 9, Serial: 9}, Ready: true}
	})
	p.Beat++
	require.NoError(t, store.settlePart(ctx, mine, p))
	require.True(t, p.Second.ready())

	p.State, p.Session = Done, client.Session{}
	change(func(now *Part) { now.State, now.Session = Done, client.Session{} }) // p's change, without an answer
	change(func(now *Part) { now.Second.Session, now.Second.Ready = client.Session{}, false })
	require.NoError(t, store.settlePart(ctx, mine, p))
	require.False(t, p.Second.Runs())
	p.Records++
	require.NoError(t, store.settlePart(ctx, mine, p), "it knows the record's version")

	forged := *p
	forged.Index = 5
	require.NoError(t, store.t.Put(ctx, partKey(1, phaseMap, 0), encode(&forged)))
	_, err = store.part(ctx, p)
	require.ErrorIs(t, err, errLost, "of another part")
}

// Workers leave a part to its second attempt as long as that beats.
func TestPartsAreLeftToSecondAttempts(t *testing.T) {
	w := &worker{Config: Config{Name: "a", Lease: time.Hour}, seen: map[string]sighting{}}
	p := &Part{Job: 1, Phase: phaseMap, State: Pending, Attempt: 1, Second: &Second{Worker: "b", Session: client.Session{Number: 9, Serial: 9}}}
	none := &staff{workers: 2}
	require.Zero(t, w.rank(p, none))
	require.Zero(t, w.rank(p, none))
	w.Lease = -1
	require.Positive(t, w.rank(p, none))
	w.Lease, p.Second.Session = time.Hour, client.Session{}
	require.Positive(t, w.rank(p, none))
}
