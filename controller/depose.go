package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/quarrystore/quarry/internal/clock"
)

// A leader that is killed would hold its leadership until etcd's lease for it runs out,
// after 2 to 3 s. Standbys do not wait for that: when the leader answers neither the pulse
// nor probes, a standby revokes its lease.
//
// Invariant: a leader answers without a write only for the time hold after it has sent its
// last read of the election key that showed its own key. So a successor whose predecessor's
// lease was revoked waits for hold after it has won, before it does or answers anything. It
// knows of the revocation from a mark in etcd, which is written first and names the
// leadership by its revision.

const (
	// leadHold is how long a read of the election key lets a leader answer. Others read it
	// from its candidacy: another version may hold for longer. With a shorter one, leaders on
	// hosts that lack processor time would refuse to answer for moments.
	leadHold = 1200 * time.Millisecond
	// holdMargin is what a successor waits beyond hold, for the drift of two clocks.
	holdMargin = leadHold / 50
	// Of a leader whose pulse is silent.
	leaderProbes    = 3
	leaderProbeTime = 300 * time.Millisecond
	leaderProbeGap  = 30 * time.Millisecond
	lookEvery       = 12 * clock.Grain // the pulse tells when to look
	// deposeTime is how long each step of a deposition may take before it is tried again:
	// members of etcd forward requests to etcd's leader, and lose them if that has just died
	// together with the controller in its process.
	deposeTime  = 300 * time.Millisecond
	deposeRetry = 30 * time.Millisecond
	// deposeAgain is how long a standby deposes no other leader after it has deposed one, so
	// that controllers with a partial network partition do not depose each other in turns.
	deposeAgain = 5 * time.Second
	// restAfter is how long a controller that was deposed although it worked deposes no leader
	// itself. It and its successor cannot reach each other, and would depose each other again
	// and again. The cost is small: a leader that is gone loses its leadership when its lease
	// runs out.
	restAfter = 10 * time.Minute
)

// candidacy is what a controller writes into the election: its URL, which has no spaces,
// and its name; then, on a second line, the fields below as JSON.
type candidacy struct {
	URL         string `json:"-"`
	Name        string `json:"-"`
	Pulse       string `json:"pulse,omitempty"`       // UDP address of its pulse; "": none
	Incarnation uint64 `json:"incarnation,omitempty"` // in the pulse
	HoldMs      uint32 `json:"hold_ms,omitempty"`     // 0: not known
	Member      uint64 `json:"member,omitempty"`      // of etcd, inside the controller; 0: none, or not known
	// Key, Rev and Lease are those of the key that the candidacy was read from.
	Key   string `json:"-"`
	Rev   int64  `json:"-"`
	Lease int64  `json:"-"`
}

// encode is the value of the election key.
func (k candidacy) encode() string {
	b, err := json.Marshal(k)
	if err != nil {
		panic(err) // no value of these types fails
	}
	return k.URL + " " + strings.ReplaceAll(k.Name, "\n", " ") + "\n" + string(b)
}

// decodeCandidacy reads a candidacy, also one of another version: what it does not have is zero.
func decodeCandidacy(value []byte) (k candidacy) {
	line, more, _ := strings.Cut(string(value), "\n")
	if json.Unmarshal([]byte(more), &k) != nil {
		k = candidacy{} // of another version
	}
	k.URL, k.Name, _ = strings.Cut(line, " ")
	return k
}

// candidacy is this controller's.
func (c *Controller) candidacy() candidacy {
	k := candidacy{URL: c.url, Name: c.cfg.Name, Incarnation: c.pulse.incarnation, HoldMs: uint32(c.cfg.hold().Milliseconds())}
	if p := c.pulse.port; p != nil {
		k.Pulse = p.Address()
	}
	if m := c.cfg.Member; m != nil {
		k.Member = m.ID()
	}
	return k
}

// watchLeader has standbys depose a leader that is gone.
func (c *Controller) watchLeader() {
	var since time.Time // the last deposition by this one
	wait := clock.Aligned(lookEvery)
	for {
		select {
		case <-c.ctx.Done():
			return
		case <-c.pulse.wake:
		case <-time.After(wait):
		}
		wait = clock.Aligned(lookEvery)
		k := c.leader.Load()
		if c.Leads() || k.Lease == 0 || k.HoldMs == 0 || k.Incarnation == c.pulse.incarnation || now() < c.rests.Load() || time.Since(since) < deposeAgain || !c.gone(k) {
			continue
		}
		c.awaitEtcd()
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

// restIfDeposed finds out why a term has ended. If its key is gone while its lease still runs, a
// standby that could not reach this controller has deposed it: then this controller deposes no
// leader for restAfter.
func (c *Controller) restIfDeposed(t *term) {
	if now() >= t.leased.Load() || c.ctx.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(c.ctx, keepTime)
	defer cancel()
	res, err := c.cfg.Etcd.Get(ctx, t.key)
	if err != nil || len(res.Kvs) > 0 && res.Kvs[0].CreateRevision == t.rev {
		return // it has stepped down by itself, or it is not known
	}
	c.rests.Store(now() + int64(restAfter))
	c.cfg.Logger.Warn("controller: it was well and has been deposed; it deposes no other controller for a while: is the network between controllers whole?",
		"term", t.rev, "while", restAfter)
}

// gone reports that the leader answers neither the pulse of any member nor the probes of
// this controller.
func (c *Controller) gone(k *candidacy) bool {
	for i := range leaderProbes {
		if !c.silent(k.Incarnation) || c.answers(k.URL, k.Incarnation) {
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

// answers reports that an incarnation of a controller answers, with any status.
func (c *Controller) answers(url string, incarnation uint64) bool {
	header, ok := c.probe(url)
	if !ok {
		return false
	}
	// Another incarnation at the same address is not the one that leads.
	is := header.Get(incarnationHeader)
	return is == "" || is == strconv.FormatUint(incarnation, 10)
}

// unreachable says whether an error of a probe shows that no process answers there. A certificate
// that does not verify does not show that: a process has sent it.
func unreachable(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, io.EOF)
}

// incarnationHeader of /healthz says which incarnation of a controller answers.
const incarnationHeader = "Quarry-Controller-Incarnation"

// deposedPrefix is where the marks of deposed leaderships are.
func (c *Controller) deposedPrefix() string { return c.cfg.Prefix + "deposed/" }

// depose writes the mark, then revokes the lease; false if the leader has lost its
// leadership already.
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
	// The mark is in etcd: the successor will wait for hold.
	rctx, cancel := context.WithTimeout(c.ctx, deposeTime)
	defer cancel()
	if _, err = c.cfg.Etcd.Revoke(rctx, clientv3.LeaseID(k.Lease)); errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return false, nil // another standby was faster
	}
	return err == nil, err
}

// waitOut returns when no earlier leader can still answer. key and rev are this controller's
// in the election, and won is when it won.
func (c *Controller) waitOut(ctx context.Context, key string, rev int64, won time.Time) error {
	// A linearizable read after the victory shows the marks of all earlier leaderships.
	res, err := c.cfg.Etcd.Get(ctx, c.deposedPrefix(), clientv3.WithPrefix())
	if err != nil {
		return fmt.Errorf("etcd: %w", err)
	}
	var hold time.Duration
	var done []clientv3.Op
	for _, kv := range res.Kvs {
		of, err := strconv.ParseInt(strings.TrimPrefix(string(kv.Key), c.deposedPrefix()), 16, 64)
		if err == nil && of >= rev {
			continue // of this leadership or a later one: the successor waits for it
		}
		ms, err := strconv.Atoi(string(kv.Value))
		if err != nil {
			ms = int(c.cfg.LeaderTTL / time.Millisecond)
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
