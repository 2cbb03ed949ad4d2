package sim

import (
	"cmp"
	"errors"
	"slices"

	"github.com/quarrystore/quarry/controller/state"
)

// etcd is a small model of the store behind the controllers: records with
// revisions, guarded transactions, and one leader's key with a lease. It is atomic. The
// messages of the machines delay, lose and duplicate requests and answers.
type etcd struct {
	rev     uint64                  // of the last transaction
	records map[string]state.Record // in code that ranges over it, the records are sorted

	term   uint64 // revision of the leader's key; 0: there is no leader
	holder int    // controller that has the key
	until  int64  // end of the holder's lease
}

var (
	errNotLeader = errors.New("the leader's key is not there any more")
	errGuard     = errors.New("a record has changed")
)

func newEtcd() etcd { return etcd{rev: 1, records: map[string]state.Record{}} }

// clone copies the records; the copy has no leader.
func (e *etcd) clone() etcd {
	c := etcd{rev: e.rev, records: make(map[string]state.Record, len(e.records))}
	for k, r := range e.records {
		c.records[k] = r
	}
	return c
}

// expire deletes the leader's key if its lease is over.
func (e *etcd) expire(now int64) {
	if e.term != 0 && now >= e.until {
		e.term = 0
		e.rev++
	}
}

// campaign makes who the leader if there is none. Its term is greater than any before.
func (e *etcd) campaign(who int, now, ttl int64) (term uint64, ok bool) {
	e.expire(now)
	if e.term != 0 {
		return 0, false
	}
	e.rev++
	e.term, e.holder, e.until = e.rev, who, now+ttl
	return e.term, true
}

// extend renews the leader's lease.
func (e *etcd) extend(term uint64, now, ttl int64) bool {
	e.expire(now)
	if e.term != term {
		return false
	}
	e.until = now + ttl
	return true
}

// resign deletes the leader's key.
func (e *etcd) resign(term uint64, now int64) {
	if e.expire(now); e.term == term {
		e.term = 0
		e.rev++
	}
}

// txn changes records if the term still leads and none has changed meanwhile.
func (e *etcd) txn(term uint64, ops []state.Op, now int64) (rev uint64, err error) {
	if e.expire(now); e.term != term || term == 0 {
		return 0, errNotLeader
	}
	for _, op := range ops {
		if e.records[op.Key].Revision != op.Prev {
			return 0, errGuard
		}
	}
	e.rev++
	for _, op := range ops {
		if op.Value == nil {
			delete(e.records, op.Key)
		} else {
			e.records[op.Key] = state.Record{Key: op.Key, Value: op.Value, Revision: e.rev}
		}
	}
	return e.rev, nil
}

// all reads every record at one revision.
func (e *etcd) all() []state.Record {
	out := make([]state.Record, 0, len(e.records))
	for _, r := range e.records {
		out = append(out, r)
	}
	slices.SortFunc(out, func(a, b state.Record) int { return cmp.Compare(a.Key, b.Key) })
	return out
}
