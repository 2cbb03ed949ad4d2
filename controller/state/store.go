package state

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// This file stages changes of records, and holds back whatever would show them until they are
// committed.

// Keys of the records. Part of the format of the store: append only.
const (
	clusterKey    = ClusterKey
	nodePrefix    = "nodes/"
	regionPrefix  = "regions/"
	sessionPrefix = "sessions/"
	tenantPrefix  = "tenants/"
)

// ClusterKey is the key of the cluster's record.
const ClusterKey = "cluster"

// Prefixes are the key prefixes of all records that New needs.
var Prefixes = []string{clusterKey, KeysKey, nodePrefix, regionPrefix, sessionPrefix, tenantPrefix}

func nodeKey(id uint32) string        { return fmt.Sprintf("%s%08x", nodePrefix, id) }
func regionKey(id uint32) string      { return fmt.Sprintf("%s%08x", regionPrefix, id) }
func sessionKey(serial uint64) string { return fmt.Sprintf("%s%016x", sessionPrefix, serial) }

func tenantKey(id uint32) string { return fmt.Sprintf("%s%08x", tenantPrefix, id) }

// SessionKey is the key of a session's record, which changes when the session is no
// longer live, and not before.
func SessionKey(serial uint64) string { return sessionKey(serial) }

// IsLive says whether a session's record is that of a live one.
func IsLive(rec *quarrypb.Session) bool { return rec.State == stateLive }

// batch is a transaction in the making, and what is held back until it is in.
type batch struct {
	ops  []Op                        // one for each key
	at   map[string]int              // where a key is in ops
	then map[string]func(rev uint64) // what a record's commit changes in memory
	held []Action                    // of the steps that have added to ops, and later ones
}

// store queues changes. Invariant: only the last of queue still grows; queue[0] is
// the one that is out, if any is.
type store struct {
	revs  map[string]uint64 // committed revision of every record
	queue []*batch          // not committed, in their order
	out   bool              // queue[0] is with the caller
	// actions are those of this step; ready are those of earlier steps whose transaction is
	// committed.
	actions, ready []Action
}

// change is one record's new value; a nil message deletes it.
type change struct {
	key  string           // of the record
	msg  proto.Message    // the new value; nil: none
	then func(rev uint64) // runs when it is committed, at that revision
}

// stage queues changes that take effect together or not at all.
// Preconditions: at most maxOps of them.
func (m *Machine) stage(cs ...change) {
	s := &m.store
	var b *batch
	if n := len(s.queue); n > 0 && !(n == 1 && s.out) && len(s.queue[n-1].ops)+len(cs) <= maxOps {
		b = s.queue[n-1]
	} else {
		b = &batch{at: map[string]int{}, then: map[string]func(uint64){}}
		s.queue = append(s.queue, b)
	}
	for _, c := range cs {
		op := Op{Key: c.key}
		if id, ok := strings.CutPrefix(c.key, tenantPrefix); ok && c.msg == nil {
			op.Empty = TenantNames + id + "/" // names are changed by transactions of their own
		}
		if c.msg != nil {
			v, err := proto.MarshalOptions{Deterministic: true}.Marshal(c.msg)
			if err != nil {
				panic(err) // our own messages: only invalid UTF-8 fails, and requests are checked
			}
			op.Value = append([]byte{}, v...)
		}
		if i, ok := b.at[c.key]; ok {
			b.ops[i] = op
		} else {
			b.at[c.key] = len(b.ops)
			b.ops = append(b.ops, op)
		}
		b.then[c.key] = c.then
	}
}

// release ends a step: the actions that may be carried out now.
func (m *Machine) release() []Action {
	acts := m.store.ready
	if n := len(m.store.queue); n > 0 {
		b := m.store.queue[n-1]
		b.held = append(b.held, m.store.actions...)
	} else {
		acts = append(acts, m.filled(m.store.actions)...)
	}
	m.store.ready, m.store.actions = nil, nil
	if s := &m.store; len(s.queue) > 0 && !s.out {
		b := s.queue[0]
		for i := range b.ops {
			b.ops[i].Prev = s.revs[b.ops[i].Key]
		}
		s.out = true
		acts = append(acts, Commit{Ops: b.ops})
	}
	return acts
}

// committed applies the transaction that was out and says what was held back.
func (m *Machine) committed(rev uint64) {
	s := &m.store
	b := s.queue[0]
	s.queue, s.out = s.queue[1:], false
	before := m.log.revision
	for _, op := range b.ops {
		if op.Value == nil {
			delete(s.revs, op.Key)
		} else {
			s.revs[op.Key] = rev
		}
		if then := b.then[op.Key]; then != nil {
			then(rev)
		}
	}
	if m.log.revision > before {
		m.log.compact(m)
		m.store.ready = append(m.store.ready, TableChanged{Revision: m.log.revision})
	}
	// What was held follows from what is committed now: it does not wait for anything staged since.
	m.store.ready = append(m.store.ready, m.filled(b.held)...)
	m.waits.dirty = true
}

// filled is fill for each of the actions.
func (m *Machine) filled(acts []Action) []Action {
	for i := range acts {
		acts[i] = m.fill(acts[i])
	}
	return acts
}

// fill puts the committed table into an answer that carries one.
func (m *Machine) fill(a Action) Action {
	ans, ok := a.(Answer)
	if !ok || ans.Err != nil {
		return a
	}
	switch r := ans.Msg.(type) {
	case *quarrypb.OpenSessionResponse:
		if r.Table == nil {
			r.Table = m.log.answer(m, &ans)
		}
	case *quarrypb.HeartbeatResponse:
		if r.Table == nil && m.log.revision > ans.since {
			r.Table = m.log.answer(m, &ans)
		}
		r.ReclaimEpoch = m.log.reclaim
	case *quarrypb.Table:
		if r.Revision == 0 {
			ans.Msg = m.log.since(m, ans.since)
		}
	case *quarrypb.StatusResponse:
		if r.Table == nil {
			r.Table = m.statusTable()
		}
	}
	return ans
}

// load takes in one record.
func (m *Machine) load(r Record) error {
	m.store.revs[r.Key] = r.Revision
	var err error
	switch {
	case r.Key == clusterKey:
		c := &quarrypb.Cluster{}
		if err = proto.Unmarshal(r.Value, c); err == nil {
			if len(c.Uuid) != 16 {
				err = errorf(Internal, "uuid of %d bytes", len(c.Uuid))
			}
			c.ProtoReflect().SetUnknown(nil) // the ticket key of earlier versions goes with the next write
			m.cluster = c
			m.log.revision = max(m.log.revision, r.Revision)
			m.log.reclaim = c.ReclaimEpoch
		}
	case r.Key == KeysKey:
		var rec *quarrypb.SigningKeys
		if rec, err = DecodeKeys(r.Value); err == nil {
			m.keys.use(rec)
			m.keys.renewed = m.now // the leader before this one may have
		}
	case strings.HasPrefix(r.Key, nodePrefix):
		rec := &quarrypb.Node{}
		if err = proto.Unmarshal(r.Value, rec); err == nil {
			n := &node{rec: rec, pub: rec, rev: r.Revision, heard: m.now, due: m.now + m.suspectAfter()}
			m.nodes = append(m.nodes, n)
			m.nodeByName[rec.Name] = n
		}
	case strings.HasPrefix(r.Key, regionPrefix):
		rec := &quarrypb.Region{}
		if err = proto.Unmarshal(r.Value, rec); err == nil {
			g := &region{rec: rec, rev: r.Revision}
			if published(rec) {
				g.pub = rec
			}
			m.regions = append(m.regions, g)
		}
	case strings.HasPrefix(r.Key, sessionPrefix):
		rec := &quarrypb.Session{}
		if err = proto.Unmarshal(r.Value, rec); err == nil {
			m.addSession(&session{rec: rec, until: m.now + m.lease()})
		}
	case strings.HasPrefix(r.Key, tenantPrefix):
		rec := &quarrypb.Tenant{}
		if err = proto.Unmarshal(r.Value, rec); err == nil {
			m.tenants.of(rec.Id).rec = rec
		}
	}
	if err != nil {
		return fmt.Errorf("record %s is damaged: %v; restore the store from a backup", r.Key, err)
	}
	return nil
}

// putCluster stages a new cluster record.
func (m *Machine) putCluster(c *quarrypb.Cluster) { m.stage(m.clusterChange(c)) }

// clusterChange is the change to a new cluster record, which the machine uses at once.
func (m *Machine) clusterChange(c *quarrypb.Cluster) change {
	m.cluster = c
	return change{clusterKey, c, func(rev uint64) {
		if m.log.revision == 0 || c.ReclaimEpoch > m.log.reclaim {
			m.log.revision, m.log.reclaim = rev, c.ReclaimEpoch
		}
	}}
}

// editCluster returns a copy of the cluster record to change.
func (m *Machine) editCluster() *quarrypb.Cluster { return proto.CloneOf(m.cluster) }
