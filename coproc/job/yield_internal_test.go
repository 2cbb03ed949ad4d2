package job

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// One attempt of a part gives way, no second one: so the number of attempts stays within what workers of earlier versions accept. Workers that die use
// up the four attempts beside it.
func TestHazard226_OneAttemptGivesWay(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Lease: 30 * time.Second}).Connect(client.Config{})
	cfg, err := Config{Client: c, Name: "a", Lease: time.Hour}.withDefaults()
	require.NoError(t, err)
	w, err := newWorker(ctx, cfg, nil, nil)
	require.NoError(t, err)
	p := &Part{Job: 1, Phase: phaseMap, State: Running, Attempt: 3, Session: w.session, Second: &Second{Worker: "b", Session: client.Session{Number: 9, Serial: 9}, Ready: true}}
	require.NoError(t, w.store.t.PutIfAbsent(ctx, partKey(1, phaseMap, 0), encode(p)))
	read := func() (now *Part) {
		now, err := w.store.part(ctx, p)
		require.NoError(t, err)
		return now
	}
	p = read()
	e := newEnv(ctx, w, &Job{ID: 1}, coproc.Part{})
	require.ErrorIs(t, w.beat(p, e), errYields)
	w.record(&Job{ID: 1}, p, attempt{Part: *p, err: errYields}, e, time.Now())
	require.Equal(t, Pending, read().State)
	for attempt := 4; attempt <= MaxAttempts+1; attempt++ {
		p = read()
		ok, err := w.take(ctx, p)
		require.NoError(t, err)
		require.True(t, ok)
		require.Equal(t, attempt, p.Attempt)
		require.NoError(t, w.beat(p, e), "it does not give way again")
		w.ends(p) // as if its worker had died
	}
	p = read()
	_, err = w.take(ctx, p)
	require.ErrorIs(t, err, ErrNoJob, "it fails the job, of which there is no record here")
	p = read()
	require.Equal(t, Failed, p.State)
	require.LessOrEqual(t, p.Attempt, MaxAttempts+1)

	// Nor does a second attempt take a part beyond that number.
	p = &Part{Job: 1, Phase: phaseMap, Index: 1, State: Pending, Attempt: MaxAttempts + 1, Yielded: true, Second: &Second{Worker: "a", Session: w.session}}
	require.NoError(t, w.store.t.PutIfAbsent(ctx, jobKey(1), encode(&Job{ID: 1, State: Running})))
	require.NoError(t, w.store.t.PutIfAbsent(ctx, partKey(1, phaseMap, 1), encode(p)))
	require.ErrorIs(t, w.takeBeside(ctx, p), errHeld)
}
