package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// A leader that is killed would hold its place until etcd counts its lease as over,
// 2 to 3 s. Standbys do not wait for that: when gossip and probes of their own get no
// answer from it, one takes its lease away.
//
// What that must not break: a leader answers without a write only until an instant
// that it has counted itself, hold from the sending of its last read of the election
// key that has shown it there. So the successor waits out hold,
// from when it has won: not before then does it do or say anything. That the lease
// has been taken away, and did not run out, it knows from a mark that is written
// before, and names the leadership by its revision in etcd.

const (
	// leadHold is how long a look at the election key lets a leader answer. Others have it
	// from its candidacy: another version may hold for longer.
	// Shorter ones make leaders of starved hosts fall silent for moments.
	leadHold = 1200 * time.Millisecond
	// holdMargin is what a successor waits beyond hold, for the drift of two clocks.
	holdMargin = leadHold / 50
	// Of a leader that gossip calls silent.
	leaderProbes    = 3
	leaderProbeTime = 300 * time.Millisecond
	leaderProbeGap  = 30 * time.Millisecond
	lookEvery       = 500 * time.Millisecond
	// deposeTime is how long each step of a deposition may take before it is tried
	// again. Members of etcd pass what they are asked on to their leader, also to one
	// that has just died with the controller beside it: that is lost.
	deposeTime  = 300 * time.Millisecond
	deposeRetry = 30 * time.Millisecond
	// deposeAgain is how long a standby leaves leaders alone after it has deposed one:
	// where the net is cut in odd ways, they do not take turns at it.
	deposeAgain = 5 * time.Second
	// restAfter is how long one that was deposed although it was well leaves all leaders
	// alone. What it sees of the others is not what they see: it and its successor would
	// take turns, each out of reach of the other. It costs little, for the place of a
	// leader that is really gone is free when etcd has counted its lease.
	restAfter = 10 * time.Minute
)

// candidacy is what a controller writes into the election: its URL, which has no
// spaces, and its name; then, on a line of its own, what else others want to know.
type candidacy struct {
	URL    string `json:"-"`
	Name   string `json:"-"`
	Gossip string `json:"gossip,omitempty"`
	Life   uint64 `json:"life,omitempty"`
	HoldMs uint32 `json:"hold_ms,omitempty"` // 0: not known
	// Where it was read from.
	Key   string `json:"-"`
	Rev   int64  `json:"-"`
	Lease int64  `json:"-"`
}

func (k candidacy) encode() string {
	b, err := json.Marshal(k)
	if err != nil {
		panic(err) // no value of these types fails
	}
	return k.URL + " " + strings.ReplaceAll(k.Name, "\n", " ") + "\n" + string(b)
}

func decodeCandidacy(value []byte) (k candidacy) {
	line, more, _ := strings.Cut(string(value), "\n")
	if json.Unmarshal([]byte(more), &k) != nil {
		k = candidacy{} // of another version
	}
	k.URL, k.Name, _ = strings.Cut(line, " ")
	return k
}

func (c *Controller) candidacy() candidacy {
	k := candidacy{URL: c.url, Name: c.cfg.Name, Life: c.gossip.life, HoldMs: uint32(c.cfg.hold().Milliseconds())}
	if p := c.gossip.port; p != nil {
		k.Gossip = p.Address()
	}
	return k
}

// watchLeader has standbys depose a leader that is gone.
func (c *Controller) watchLeader() {
	var since time.Time // the last deposition by this one
	wait := lookEvery
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.gossip.wake:
		case <-time.After(wait):
		}
		wait = lookEvery
		k := c.leader.Load()
		if c.Leads() || k.Lease == 0 || k.HoldMs == 0 || k.Life == c.gossip.life || now() < c.rests.Load() || time.Since(since) < deposeAgain || !c.gone(k) {
			continue
		}
		done, err := c.depose(k)
		if err != nil {
			c.cfg.Logger.Info("controller: the leader is gone and not deposed yet", "leader", k.URL, "error", err)
			wait = deposeRetry
			continue
		}
		if !done {
			continue
		}
		since = time.Now()
		c.counted.deposed.Add(1)
		c.cfg.Logger.Warn("controller: the leader was gone and is deposed", "leader", k.URL, "term", k.Rev)
	}
}

// restIfDeposed looks why a term has ended: if its key is gone while its lease, as we
// count it, is not, somebody has taken it away who had no answer from us.
func (c *Controller) restIfDeposed(t *term) {
	if now() >= t.leased.Load() || c.ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(c.ctx, keepTime)
	defer cancel()
	res, err := c.cfg.Etcd.Get(ctx, t.key)
	if err != nil || len(res.Kvs) > 0 && res.Kvs[0].CreateRevision == t.rev {
		return // it has stepped down by itself, or nobody knows
	}
	c.rests.Store(now() + int64(restAfter))
	c.cfg.Logger.Warn("controller: it was well and has been deposed; it deposes nobody for a while: is the network between controllers whole?",
		"term", t.rev, "while", restAfter)
}

// gone says whether neither other members nor we get an answer from a leader.
func (c *Controller) gone(k *candidacy) bool {
	for i := range leaderProbes {
		if !c.silent(k.Life) || c.answers(k.URL, k.Life) {
			return false
		}
		if i < leaderProbes-1 {
			select {
			case <-c.ctx.Done():
				return false
			case <-time.After(leaderProbeGap):
			}
		}
	}
	return c.leader.Load() == k
}

// answers says whether a life of a controller answers at all, whatever it says.
func (c *Controller) answers(url string, life uint64) bool {
	ctx, cancel := context.WithTimeout(c.ctx, leaderProbeTime)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/healthz", nil)
	if err != nil {
		return true // nothing that we could judge by
	}
	res, err := c.probes.Do(r)
	if err != nil {
		// A certificate that does not verify says nothing about who is there.
		var op *net.OpError
		return !errors.As(err, &op) && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, io.EOF)
	}
	res.Body.Close()
	// Another life at the same address is not the one that leads.
	is := res.Header.Get(lifeHeader)
	return is == "" || is == strconv.FormatUint(life, 10)
}

// lifeHeader of /healthz says which life of a controller answers.
const lifeHeader = "Quarry-Controller-Life"

func (c *Controller) deposedPrefix() string { return c.cfg.Prefix + "deposed/" }

// depose writes the mark, then takes the lease away; false if somebody else has done it.
func (c *Controller) depose(k *candidacy) (done bool, err error) {
	ctx, cancel := context.WithTimeout(c.ctx, deposeTime)
	defer cancel()
	mark := c.deposedPrefix() + fmt.Sprintf("%016x", k.Rev)
	res, err := c.cfg.Etcd.Txn(ctx).If(guard(k.Key, k.Rev)).Then(clientv3.OpPut(mark, strconv.Itoa(int(k.HoldMs)))).Commit()
	if err != nil {
		return false, err
	}
	if !res.Succeeded {
		return false, nil // it has lost its place already
	}
	// Only now, that the mark is known to be there.
	rctx, cancel := context.WithTimeout(c.ctx, deposeTime)
	defer cancel()
	if _, err = c.cfg.Etcd.Revoke(rctx, clientv3.LeaseID(k.Lease)); errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return false, nil // another standby was faster
	}
	return err == nil, err
}

// waitOut returns when no leader before this one, whose key has a revision, can
// still answer. won is when this one won.
func (c *Controller) waitOut(ctx context.Context, key string, rev int64, won time.Time) error {
	// Linearizable, and after the victory: the mark of whoever made room for us is there.
	res, err := c.cfg.Etcd.Get(ctx, c.deposedPrefix(), clientv3.WithPrefix())
	if err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	var hold time.Duration
	var done []clientv3.Op
	for _, kv := range res.Kvs {
		of, err := strconv.ParseInt(strings.TrimPrefix(string(kv.Key), c.deposedPrefix()), 16, 64)
		if err == nil && of >= rev {
			continue // ours, or not for us: our successor waits for it
		}
		ms, err := strconv.Atoi(string(kv.Value))
		if err != nil {
			ms = int(leaderTTL * time.Second / time.Millisecond)
		}
		hold = max(hold, time.Duration(ms)*time.Millisecond)
		done = append(done, clientv3.OpDelete(string(kv.Key)))
	}
	if len(done) == 0 {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Until(won.Add(hold + holdMargin))):
	}
	for len(done) > 0 { // etcd takes 128 operations at a time
		n := min(len(done), 100)
		if _, err := c.cfg.Etcd.Txn(ctx).If(guard(key, rev)).Then(done[:n]...).Commit(); err != nil {
			return fmt.Errorf("etcd: %w", err)
		}
		done = done[n:]
	}
	return nil
}
