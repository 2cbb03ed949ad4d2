package job

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
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

	// One whose own attempt has ended here without a record of it waits for this worker.
	w.session, w.Lease, w.here = client.Session{Number: 8, Serial: 8}, time.Nanosecond, map[string]running{}
	p.State, p.Session, p.Second = Running, w.session, &Second{Worker: "b", Session: client.Session{Number: 9, Serial: 9}}
	w.seen = map[string]sighting{string(partKey(1, phaseMap, 0)): {uint64(p.Attempt), time.Now().Add(-time.Hour)}}
	require.Positive(t, w.rank(p, none))
	require.True(t, w.begins(p))
	p.Second.Beat++
	require.Zero(t, w.rank(p, none))
}

// A part's own attempt gives way to a second one that has a result, and not to one that stands still: its worker may have died, and then each attempt
// of the part would give way to it.
func TestAttemptsGiveWayToSecondOnesThatBeat(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Lease: 30 * time.Second}).Connect(client.Config{})
	store, err := Open(ctx, c)
	require.NoError(t, err)
	_, mine, err := c.Bind(ctx)
	require.NoError(t, err)
	w := &worker{Config: Config{Name: "a", Lease: time.Hour}, c: c, session: mine, store: store, tidy: ctx, seen: map[string]sighting{}}
	p := &Part{Job: 1, Phase: phaseMap, State: Running, Attempt: 2, Session: mine, Second: &Second{Worker: "b", Session: client.Session{Number: 9, Serial: 9}, Ready: true}}
	require.NoError(t, store.t.PutIfAbsent(ctx, partKey(1, phaseMap, 0), encode(p)))
	p, err = store.part(ctx, p)
	require.NoError(t, err)
	e := newEnv(ctx, w, &Job{ID: 1}, coproc.Part{})
	require.ErrorIs(t, w.beat(p, e), errYields)
	w.Lease = -1
	require.NoError(t, w.beat(p, e))
	w.Lease = time.Hour
	now, err := store.part(ctx, p)
	require.NoError(t, err)
	now.Second.Beat++
	require.NoError(t, store.swapPart(ctx, now))
	require.ErrorIs(t, w.beat(p, e), errYields, "it goes on")
}

// A plugin that does not return when its attempt gives way, or is a second one that is not needed any more, ends no worker before the attempt's deadline.
func TestSecondAttemptsEndNoWorker(t *testing.T) {
	const limit = 10 * time.Minute
	for name, is := range map[string]struct {
		cause        error
		second, ends bool // ends: the worker's session ends after a minute
		stays        time.Duration
	}{
		"gives way":                  {errYields, false, false, limit},
		"gives way, session ends":    {errYields, false, true, time.Minute},
		"second of a part done":      {errLost, true, false, limit},
		"second of a job done":       {errCancelled, true, false, limit},
		"second that takes memory":   {errMemory, true, false, 0},
		"own of a job cancelled":     {errCancelled, false, false, 0},
		"own of another worker":      {errLost, false, false, 0},
		"second of a session's end":  {client.ErrFenced, true, false, 0},
		"second of a job, cut short": {errCancelled, true, true, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				bound, end := context.WithCancel(t.Context())
				defer end()
				ctx, cancel := context.WithCancelCause(t.Context())
				dctx, stop := context.WithTimeout(ctx, limit)
				defer stop()
				w := &worker{Config: Config{Lease: 24 * time.Hour}, bound: bound}
				began := time.Now()
				cancel(is.cause)
				if is.ends {
					time.AfterFunc(time.Minute, end)
				}
				_, ok := w.await(dctx, cancel, 1, nil, make(chan attempt), is.second)
				require.False(t, ok)
				require.Equal(t, is.stays+stopTime, time.Since(began))
			})
		})
	}
}

// While a worker of an earlier version is there no second attempt begins, and no list of objects is apart from its part.
func TestEarlierWorkersMeetWhatTheyKnow(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Lease: 30 * time.Second}).Connect(client.Config{})
	cfg, err := Config{Client: c, Name: "a", Lease: time.Hour}.withDefaults()
	require.NoError(t, err)
	w, err := newWorker(ctx, cfg, nil, nil)
	require.NoError(t, err)
	parts := []*Part{{State: Done, Took: 1}, {State: Done, Took: 1}, {State: Running, Attempt: 1, Session: client.Session{Number: 9, Serial: 9}, Index: 2, Phase: phaseMap}}
	j := &Job{Phase: phaseMap}
	long := func() int {
		w.Lease = time.Hour
		require.NoError(t, w.lookAround(ctx))
		w.Lease = -1
		w.stragglers(j, parts)
		w.seen["slow/"+string(partKey(0, phaseMap, 2))] = sighting{1, time.Now().Add(-time.Hour)}
		return len(w.stragglers(j, parts))
	}
	require.Equal(t, 1, long())
	require.NoError(t, w.store.t.Put(ctx, workerKey("old"), []byte(`{"name":"old","beat":7}`)))
	require.Zero(t, long())
	p := &Part{Job: 1, Phase: phaseMap, Objects: make([]Object, 40)}
	require.NoError(t, w.setApart(ctx, []*Part{p}))
	require.Len(t, p.Objects, 40, "the record has all that an earlier worker needs")
	require.NoError(t, w.store.t.Put(ctx, workerKey("old"), encode(Worker{Name: "old", Format: format})))
	require.Equal(t, 1, long())
}
