package job_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"log/slog"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/plugins/words"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// peek copies a record of another tree than its input, and puts one there where the argument write says so.
type peek struct{}

func (peek) Map(env coproc.Env, _, _ []byte, emit coproc.Emit) error {
	tree, err := env.Tree(env.Arg("tree", ""))
	if err != nil {
		return err
	}
	if env.Arg("write", "") != "" {
		if err := tree.Put([]byte("planted"), []byte("by the job")); err != nil {
			return err
		}
	}
	v, err := tree.Get([]byte("k"), nil)
	if err != nil {
		return err
	}
	return emit([]byte("seen"), v)
}

func init() {
	coproc.Register("peek", "reads and writes another tree", func() coproc.Plugin { return peek{} })
}

const (
	mayRead   = quarrypb.Right_RIGHT_READ
	mayWrite  = quarrypb.Right_RIGHT_WRITE
	mayCreate = quarrypb.Right_RIGHT_CREATE
)

// ofTenant has a payload key for each tenant: workers of a job use that of the job's tenant.
type ofTenant struct{}

func (ofTenant) PayloadKeys(_ context.Context, tenant string) ([]client.PayloadKey, error) {
	return []client.PayloadKey{sha256.Sum256([]byte(tenant))}, nil
}

// guarded is a cluster whose callers show tokens, and encrypt payloads, and has the tenants a and b. Each has a tree "in" and a
// tree "own", in which key k says whose it is.
type guarded struct {
	*rig
	submitters map[string]*rig // by tenant: with all rights there
	pool       string          // token of workers, without any grant
}

func newGuarded(t *testing.T) *guarded {
	g := &guarded{rig: &rig{TB: t, cluster: testcluster.New(t, testcluster.Options{Nodes: 2, Token: "every role"})}, submitters: map[string]*rig{}}
	g.pool, _ = g.token("worker")
	for _, tenant := range []string{"a", "b"} {
		_, err := g.cluster.Control().CreateTenant(t.Context(), connect.NewRequest(&quarrypb.CreateTenantRequest{Name: tenant}))
		require.NoError(t, err)
		r := g.submitter(tenant, &quarrypb.Grant{Rights: []quarrypb.Right{mayRead, mayWrite, mayCreate}})
		r.tree("in", map[string]string{"x": "stone"})
		r.tree("own", map[string]string{"k": "of " + tenant})
		g.submitters[tenant] = r
	}
	return g
}

// token makes one of a role.
func (g *guarded) token(role string) (secret, id string) {
	made, err := g.cluster.Control().CreateToken(g.Context(), connect.NewRequest(&quarrypb.CreateTokenRequest{Role: role}))
	require.NoError(g, err)
	return made.Msg.Secret, "token:" + made.Msg.Token.Id
}

// submitter is a client with grants in a tenant.
func (g *guarded) submitter(tenant string, grants ...*quarrypb.Grant) *rig {
	secret, id := g.token("client")
	for _, grant := range grants {
		grant.Identity = id
		_, err := g.cluster.Control().Grant(g.Context(), connect.NewRequest(&quarrypb.GrantRequest{Tenant: tenant, Grant: grant}))
		require.NoError(g, err)
	}
	r := &rig{TB: g.TB, cluster: g.cluster, c: g.cluster.Connect(client.Config{Keys: ofTenant{}, Token: secret})}
	var err error
	r.store, err = job.Open(g.Context(), r.c)
	require.NoError(g, err)
	return r
}

// control is how the pool reaches the controllers, with all that it has.
func (g *guarded) control() client.Config {
	return client.Config{Controllers: []string{g.cluster.Controller.URL()}, Keys: ofTenant{}, Token: g.pool, Timeout: patience, Replicas: 1, Logger: slog.New(slog.DiscardHandler)}
}

// serve starts a worker of the pool, and returns when the controllers have heard of it.
func (g *guarded) serve(name string) {
	ctx, cancel := context.WithCancel(context.Background())
	ended, ready := make(chan error, 1), make(chan *client.Client, 1)
	go func() {
		ended <- job.Serve(ctx, job.Config{Name: name, Slots: 2, Logger: slog.New(slog.DiscardHandler)}, g.control(), func(own *client.Client) error { ready <- own; return nil })
	}()
	g.Cleanup(func() { cancel(); require.NoError(g, <-ended) })
	select {
	case own := <-ready:
		require.Nil(g, own, "it has no rights of its own")
	case err := <-ended:
		require.NoError(g, err)
	}
}

// refused wants an answer of the controllers, not a failure to reach them.
func refused(t testing.TB, err error, says string) {
	t.Helper()
	require.Equal(t, connect.CodePermissionDenied, connect.CodeOf(err), "%v", err)
	require.ErrorContains(t, err, says)
}

// A worker with all its secrets reads no tenant that has given it no job, and in a job what the job's submitter may
// read: one pool works for two tenants, and no job sees anything of the other.
func TestAJobHasItsSubmittersRights(t *testing.T) {
	g := newGuarded(t)
	jobs, err := client.NewJobs(g.control())
	require.NoError(t, err)
	defer jobs.Close()
	for _, tenant := range []string{"", "default", "a", "b"} {
		cfg := g.control()
		cfg.Tenant = tenant
		_, err := client.Connect(t.Context(), cfg)
		require.Equal(t, connect.CodePermissionDenied, connect.CodeOf(err), "%q: %v", tenant, err)
	}
	_, err = jobs.Connect(t.Context(), 1, "a")
	refused(t, err, "may not act for job 1 of tenant a: nothing is delegated for it")

	g.serve("w1")
	for tenant, r := range g.submitters {
		r.done(job.Spec{Plugin: "peek", Input: job.Source{Tree: "in"}, Output: "out", Args: map[string]string{"tree": "own"}})
		require.Equal(t, map[string]string{"seen": "of " + tenant}, r.read("out"))
		r.tree("only-"+tenant, map[string]string{"k": "secret"})
	}
	j := g.submitters["a"].run(job.Spec{Plugin: "peek", Input: job.Source{Tree: "in"}, Output: "out2", Args: map[string]string{"tree": "only-b"}})
	require.Equal(t, job.Failed, j.State)
	require.Contains(t, j.Error, `no such name: "only-b"`)

	// With the end of the jobs the worker's rights have ended.
	require.Eventually(t, func() bool {
		list, _, err := jobs.Poll(t.Context(), client.Worker{Name: "w2", Plugins: []byte("[]")})
		require.NoError(t, err)
		return len(list) == 0
	}, patience, 20*time.Millisecond)
	_, err = jobs.Connect(t.Context(), 1, "a")
	refused(t, err, "that has ended")
}

// Grants of a submitter bound its jobs: trees that it may not read, and trees that it may not write, whatever the
// job says. One who may only read submits nothing.
func TestAJobKeepsToTheGrants(t *testing.T) {
	g := newGuarded(t)
	g.serve("w1")
	low := g.submitter("a", &quarrypb.Grant{Prefix: "in", Rights: []quarrypb.Right{mayRead}}, &quarrypb.Grant{Prefix: "out/", Rights: []quarrypb.Right{mayRead, mayWrite, mayCreate}})
	own := map[string]string{"tree": "own"}
	write := map[string]string{"tree": "in", "write": "yes"}
	for _, row := range []struct {
		name, says string
		spec       job.Spec
	}{
		{"reads another tree", `may not read name "own"`, job.Spec{Plugin: "peek", Input: job.Source{Tree: "in"}, Output: "out/1", Args: own}},
		{"writes what it may read", "may not write it in tenant a", job.Spec{Plugin: "peek", Input: job.Source{Tree: "in"}, Output: "out/2", Writes: []string{"in"}, Args: write}},
		{"output elsewhere", "may not write it in tenant a", job.Spec{Plugin: words.Name, Input: job.Source{Tree: "in"}, Output: "more"}},
	} {
		j := low.run(row.spec)
		require.Equal(t, job.Failed, j.State, row.name)
		require.Contains(t, j.Error, row.says, row.name)
	}
	require.Equal(t, map[string]string{"x": "stone"}, g.submitters["a"].read("in"))
	low.done(job.Spec{Plugin: words.Name, Input: job.Source{Tree: "in"}, Output: "out/3"})
	require.Equal(t, map[string]string{"stone": "1"}, low.read("out/3"))

	secret, id := g.token("client")
	_, err := g.cluster.Control().Grant(t.Context(), connect.NewRequest(&quarrypb.GrantRequest{Tenant: "a", Grant: &quarrypb.Grant{Identity: id, Rights: []quarrypb.Right{mayRead}}}))
	require.NoError(t, err)
	reader := g.cluster.Connect(client.Config{Keys: ofTenant{}, Token: secret, ReadOnly: true})
	_, err = reader.Jobs().Delegate(t.Context(), 77, make([]byte, 32), 0)
	refused(t, err, "may only read in tenant a")
	store, err := job.Open(t.Context(), reader)
	require.NoError(t, err)
	_, err = store.Submit(t.Context(), job.Spec{Plugin: words.Name, Input: job.Source{Tree: "in"}, Output: "out/4"})
	require.ErrorIs(t, err, client.ErrReadOnly)
}

// A delegation is good for its job, for workers, while it lasts, and for what was submitted.
func TestDelegationsAreBound(t *testing.T) {
	g := newGuarded(t)
	a := g.submitters["a"]
	jobs, err := client.NewJobs(g.control())
	require.NoError(t, err)
	defer jobs.Close()
	w1 := client.Worker{Name: "w1", Plugins: []byte(`[{"name":"words"}]`)}
	_, _, err = jobs.Poll(t.Context(), w1)
	require.NoError(t, err)
	spec := job.Spec{Plugin: words.Name, Input: job.Source{Tree: "in"}, Output: "out"}
	j, err := a.store.Submit(t.Context(), spec)
	require.NoError(t, err)
	require.True(t, j.Delegated)

	c, err := jobs.Connect(t.Context(), j.ID, "a")
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	tree, err := kv.Open(t.Context(), c, "own", btree.Config{})
	require.NoError(t, err)
	require.NoError(t, tree.Put(t.Context(), []byte("k2"), nil))
	_, err = jobs.Connect(t.Context(), j.ID+1, "a")
	refused(t, err, "nothing is delegated for it")
	_, err = jobs.Connect(t.Context(), j.ID, "b")
	refused(t, err, "nothing is delegated for it")
	require.Equal(t, connect.CodePermissionDenied, connect.CodeOf(c.Names().Delete(t.Context(), "in", 0)), "clients delete no names")
	_, err = c.Jobs().Delegate(t.Context(), j.ID+1, make([]byte, 32), 0)
	refused(t, err, "cannot delegate what is not its own")
	_, err = g.submitters["b"].c.Jobs().Connect(t.Context(), j.ID, "a")
	refused(t, err, "it is for [worker]")
	other := g.submitter("a", &quarrypb.Grant{Rights: []quarrypb.Right{mayRead, mayWrite}})
	_, err = other.c.Jobs().Delegate(t.Context(), j.ID, make([]byte, 32), 0)
	require.Equal(t, connect.CodeAlreadyExists, connect.CodeOf(err), "%v", err)
	refused(t, other.c.Jobs().End(t.Context(), j.ID, true), "has not submitted job")

	// Revoked: the session of the worker changes nothing any more when it returns.
	id := c.SessionID()
	require.NoError(t, a.store.Revoke(t.Context(), j.ID))
	require.NotEqual(t, "live", g.cluster.SessionState(id))
	_, err = jobs.Connect(t.Context(), j.ID, "a")
	refused(t, err, "that has ended")

	// Over: its time, and then the sessions that were opened in it.
	spec.Lasts = time.Second
	j, err = a.store.Submit(t.Context(), spec)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		list, _, err := jobs.Poll(t.Context(), w1)
		require.NoError(t, err)
		return len(list) == 0
	}, patience, 20*time.Millisecond)
	_, err = jobs.Connect(t.Context(), j.ID, "a")
	require.Equal(t, connect.CodePermissionDenied, connect.CodeOf(err), "%v", err)

	// The record of a job is changed by another program of the tenant: it does not run.
	spec.Lasts = 0
	j, err = a.store.Submit(t.Context(), spec)
	require.NoError(t, err)
	state, err := kv.Open(t.Context(), other.c, job.StateTree, btree.Config{})
	require.NoError(t, err)
	changed := *j
	changed.Spec.Output = "in"
	changed.Spec.Input.Tree = "own"
	b, err := json.Marshal(&changed)
	require.NoError(t, err)
	require.NoError(t, state.Put(t.Context(), []byte("job/000000000003"), b))
	g.serve("w2")
	j = a.wait(3)
	require.Equal(t, job.Failed, j.State)
	require.Contains(t, j.Error, "is not what its submitter has delegated")
	require.Equal(t, map[string]string{"x": "stone"}, a.read("in"))
}

// A worker that goes on after its delegation has ended is fenced, and a token that is revoked ends what it has
// delegated.
func TestSessionsEndWithTheDelegation(t *testing.T) {
	g := newGuarded(t)
	jobs, err := client.NewJobs(g.control())
	require.NoError(t, err)
	defer jobs.Close()
	a := g.submitters["a"]
	needed, err := a.c.Jobs().Delegate(t.Context(), 9, make([]byte, 32), 0)
	require.NoError(t, err)
	require.True(t, needed)
	c, err := jobs.Connect(t.Context(), 9, "a")
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	id := c.SessionID()
	require.NoError(t, a.c.Jobs().End(t.Context(), 9, false))
	require.Eventually(t, func() bool { return g.cluster.SessionState(id) != "live" }, patience, 50*time.Millisecond)

	secret, token := g.token("client")
	_, err = g.cluster.Control().Grant(t.Context(), connect.NewRequest(&quarrypb.GrantRequest{Tenant: "a", Grant: &quarrypb.Grant{Identity: token, Rights: []quarrypb.Right{mayRead, mayWrite}}}))
	require.NoError(t, err)
	_, err = g.cluster.Connect(client.Config{Keys: ofTenant{}, Token: secret}).Jobs().Delegate(t.Context(), 10, make([]byte, 32), 0)
	require.NoError(t, err)
	c10, err := jobs.Connect(t.Context(), 10, "a")
	require.NoError(t, err)
	t.Cleanup(func() { c10.Close() })
	_, err = g.cluster.Control().RevokeToken(t.Context(), connect.NewRequest(&quarrypb.RevokeTokenRequest{Id: token[len("token:"):]}))
	require.NoError(t, err)
	_, err = jobs.Connect(t.Context(), 10, "a")
	refused(t, err, "is not valid any more")
	require.False(t, errors.Is(err, client.ErrUnreachable))
}

// Sessions of workers end with the rights of the submitter.
func TestSessionsEndWithTheSubmittersRights(t *testing.T) {
	g := newGuarded(t)
	jobs, err := client.NewJobs(g.control())
	require.NoError(t, err)
	defer jobs.Close()
	open := func(job uint64, r *rig) *client.Client {
		_, err := r.c.Jobs().Delegate(t.Context(), job, make([]byte, 32), 0)
		require.NoError(t, err)
		c, err := jobs.Connect(t.Context(), job, "a")
		require.NoError(t, err)
		t.Cleanup(func() { c.Close() })
		return c
	}
	ended := func(c *client.Client) {
		t.Helper()
		id := c.SessionID()
		require.Eventually(t, func() bool {
			state := g.cluster.SessionState(id)
			return state != "live" && state != "expired"
		}, patience, 50*time.Millisecond)
	}
	token := func(grants ...*quarrypb.Grant) (*rig, string) {
		secret, id := g.token("client")
		for _, grant := range grants {
			grant.Identity = id
			_, err := g.cluster.Control().Grant(t.Context(), connect.NewRequest(&quarrypb.GrantRequest{Tenant: "a", Grant: grant}))
			require.NoError(t, err)
		}
		return &rig{TB: t, cluster: g.cluster, c: g.cluster.Connect(client.Config{Keys: ofTenant{}, Token: secret})}, id
	}
	writes := func() *quarrypb.Grant {
		return &quarrypb.Grant{Prefix: "out/", Rights: []quarrypb.Right{mayRead, mayWrite}}
	}
	one, oneID := token(writes())
	two, twoID := token(writes())
	three, threeID := token(writes(), &quarrypb.Grant{Prefix: "in", Rights: []quarrypb.Right{mayRead}})
	kept := open(20, g.submitters["a"])
	ofOne, ofTwo, ofThree := open(21, one), open(22, two), open(23, three)
	_, err = g.cluster.Control().RevokeToken(t.Context(), connect.NewRequest(&quarrypb.RevokeTokenRequest{Id: oneID[len("token:"):]}))
	require.NoError(t, err)
	out := "out/"
	for _, id := range []string{twoID, threeID} { // one of them may read yet
		_, err = g.cluster.Control().RevokeGrant(t.Context(), connect.NewRequest(&quarrypb.RevokeGrantRequest{Tenant: "a", Identity: id, Prefix: &out}))
		require.NoError(t, err)
	}
	ended(ofOne)
	ended(ofTwo)
	ended(ofThree)
	require.Equal(t, "live", g.cluster.SessionState(kept.SessionID()))
}
