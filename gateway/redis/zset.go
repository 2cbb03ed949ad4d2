package redis

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"math"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
)

// This file has the commands that change sorted sets.

// zaddFlags are the options of ZADD.
type zaddFlags struct{ nx, xx, gt, lt, ch, incr bool }

// set sets the flag of an option; false if the word is no option.
func (f *zaddFlags) set(option string) bool {
	switch option {
	case "nx":
		f.nx = true
	case "xx":
		f.xx = true
	case "gt":
		f.gt = true
	case "lt":
		f.lt = true
	case "ch":
		f.ch = true
	case "incr":
		f.incr = true
	default:
		return false
	}
	return true
}

// check refuses options that exclude each other, with the messages of Redis.
func (f *zaddFlags) check(members int) error {
	switch {
	case f.nx && f.xx:
		return fault("ERR XX and NX options at the same time are not compatible")
	case f.gt && f.nx || f.lt && f.nx || f.gt && f.lt:
		return fault("ERR GT, LT, and/or NX options at the same time are not compatible")
	case f.incr && members > 1:
		return fault("ERR INCR option supports a single increment-element pair")
	}
	return nil
}

// zaddPairs are the options, the pairs of score and member, and the scores of a ZADD.
func zaddPairs(a [][]byte) (f zaddFlags, pairs [][]byte, scores []float64, err error) {
	i := 2
	for i < len(a) && f.set(lowered(a[i])) {
		i++
	}
	if pairs = a[i:]; len(pairs) == 0 || len(pairs)%2 != 0 {
		return f, nil, nil, errSyntax
	}
	scores = make([]float64, len(pairs)/2)
	if err := f.check(len(scores)); err != nil {
		return f, nil, nil, err
	}
	for i := range scores {
		var ok bool
		if scores[i], ok = parseFloat(pairs[2*i]); !ok {
			return f, nil, nil, errNotFloat
		}
	}
	return f, pairs, scores, nil
}

// zadd is ZADD: it adds members or changes their scores, under the conditions of its flags.
func zadd(c *conn, a [][]byte) error {
	f, pairs, scores, err := zaddPairs(a)
	if err != nil {
		return err
	}
	if err := c.checkFields(pairs[1:], 2); err != nil {
		return err
	}
	var sum added
	// With XX each member is a try of its own: the try that repeats a missed member under
	// another id must not repeat the members that an earlier try has written.
	each := len(scores)
	if f.xx {
		each = 1
	}
	for from := 0; from < len(scores); from += each {
		n, err := c.places(a[1], pairs[2*from:2*(from+each)], scores[from:from+each], f)
		if err != nil {
			return err
		}
		sum.new, sum.changed, sum.last = sum.new+n.new, sum.changed+n.changed, n.last
	}
	switch {
	case f.incr && sum.last == nil:
		c.null()
	case f.incr:
		c.double(*sum.last)
	case f.ch:
		c.integer(int64(sum.changed))
	default:
		c.integer(int64(sum.new))
	}
	return nil
}

// zincrby is ZINCRBY: ZADD with INCR and one member, without conditions.
func zincrby(c *conn, a [][]byte) error {
	score, ok := parseFloat(a[2])
	if !ok {
		return errNotFloat
	}
	if err := c.checkFields(a[3:], 1); err != nil {
		return err
	}
	n, err := c.places(a[1], a[2:4], []float64{score}, zaddFlags{incr: true})
	if err != nil {
		return err
	}
	c.double(*n.last)
	return nil
}

// added is what ZADD has done.
type added struct {
	new     int      // members
	changed int      // members whose score is another now, and new ones
	last    *float64 // the score of the last member; nil: an option refused to change it
}

// places gives members their scores.
func (c *conn) places(key []byte, pairs [][]byte, scores []float64, f zaddFlags) (n added, err error) {
	err = c.within(key, kindZset, !f.xx, func(id uint64) (did effect, err error) {
		n = added{}
		if id == 0 {
			return effectNone, nil
		}
		for from := 0; from < len(scores) && err == nil; {
			c.placings = c.placings[:0]
			for from+len(c.placings) < len(scores) {
				i := from + len(c.placings)
				if !c.addPlacing(placing{id: id, member: pairs[2*i+1], asked: scores[i], make: !f.xx, into: &c.written}) {
					break
				}
			}
			ms := c.placeable()
			err = c.place(ms, f)
			for _, m := range ms {
				n.count(&m.placed)
				if m.missed {
					did = effectMissed
				}
			}
			from += len(ms)
		}
		if len(c.written) > 0 {
			did = effectWrote
		}
		return did, err
	})
	return n, err
}

// count adds what has been done to a member.
func (n *added) count(p *placed) {
	if p.added {
		n.new++
	}
	if p.added || p.changed {
		n.changed++
	}
	if !p.refused {
		n.last = &p.score
	}
}

// placed is what place has done.
type placed struct {
	score   float64 // of the member
	added   bool    // the member was not there
	changed bool    // the member was there, with another score
	refused bool    // an option kept the member as it was
	missed  bool    // refused because the member was not there
}

// scoreBytes is the length of a score; a member with a shorter value is claimed and not
// there yet.
const scoreBytes = 8

// member reads a member's score; there is false if it is not there, version 0 if it is not
// claimed either.
func (c *conn) member(id uint64, member []byte) (score float64, version uint64, there bool, err error) {
	value, version, err := c.field(id, member)
	if err != nil || version == 0 {
		return 0, 0, false, err
	}
	score, there, err = decodeScore(value)
	return score, version, there, err
}

// scoreBits is what is stored of a score: as in Redis, no negative zero.
func scoreBits(score float64) uint64 {
	if score == 0 {
		return 0
	}
	return math.Float64bits(score)
}

// decodeScore reads a member's record; there is false for a claim, which has no score yet.
func decodeScore(value []byte) (score float64, there bool, err error) {
	switch len(value) {
	case 0:
		return 0, false, nil
	case scoreBytes:
		return math.Float64frombits(binary.BigEndian.Uint64(value)), true, nil
	}
	return 0, false, errRecord
}

// placement is a place in the order, as it was put or read.
type placement struct {
	key     []byte // of the tree
	version uint64 // of that record
}

// placing is a member that ZADD gives a score.
type placing struct {
	id          uint64
	member, key []byte     // key: of the tree
	asked       float64    // score in the command
	make        bool       // claim the member if it is not there
	into        *[]written // notes the change of the score
	change      int        // in conn.changes
	done        bool       // the score is what it should be

	old   float64 // score that the member has, if it is there
	base  uint64  // version of that score or of the claim
	there bool
	bad   error // the record is not a score

	placed
	enc   [scoreBytes]byte // the new score
	at    placement        // of the new score
	leave placement        // of the old one
	stale []placement      // that tries which failed have put
}

// addPlacing adds a member to those of c.placings, which are all different and at most btree.MaxGroup. False: it must
// wait until they have their scores.
func (c *conn) addPlacing(m placing) bool {
	if len(c.placings) == btree.MaxGroup {
		return false
	}
	for i := range c.placings {
		if o := &c.placings[i]; o.id == m.id && bytes.Equal(o.member, m.member) {
			return false
		}
	}
	c.placings = append(c.placings, m)
	return true
}

// placeable are the members of c.placings. Their keys are in c.keys.
func (c *conn) placeable() []*placing {
	c.keys.reset()
	for i := range c.placings {
		c.keys.b = appendField(c.keys.b, c.placings[i].id, c.placings[i].member)
		c.keys.end()
	}
	ms := make([]*placing, len(c.placings))
	for i, key := range c.keys.all() {
		ms[i] = &c.placings[i]
		ms[i].key = key
	}
	return ms
}

// place gives members their scores, in order. See invariant 2 for the order of writes.
//
// Linearizes at: the write of each member's score.
func (c *conn) place(ms []*placing, f zaddFlags) error {
	for try := range maxTries {
		if err := c.claim(ms); err != nil {
			return err
		}
		var change []*placing
		for _, m := range ms {
			if err := m.decide(f); err != nil {
				return err
			}
			if m.added || m.changed {
				change = append(change, m)
			} else {
				m.done = true
				c.forsake(m)
			}
		}
		if len(change) == 0 {
			return nil
		}
		n, err := c.order(change)
		for _, m := range change[n:] { // not done
			m.placed = placed{}
			m.stale = append(m.stale, m.at)
		}
		if !lost(err) {
			return err
		}
		ms = change[n:]
		pause(try)
	}
	return errContended
}

// claim reads the scores of members, and claims members that are not there.
func (c *conn) claim(ms []*placing) error {
	c.writes = c.writes[:0]
	for _, m := range ms {
		c.writes = append(c.writes, btree.Write{Key: m.key, Edit: m.claim})
	}
	_, err := c.runs(func(i int, w *btree.Write) error {
		m := ms[i]
		switch {
		case w.Err == errLeave:
			return m.bad
		case w.Err == nil:
			m.base = w.Version
			return nil
		case !errors.Is(w.Err, kv.ErrNoEdit):
			return w.Err
		}
		return c.claimAlone(m)
	})
	return err
}

// claim is the Edit of a claim.
func (m *placing) claim(old []byte, version uint64) ([]byte, bool, error) {
	m.base = version
	if m.old, m.there, m.bad = decodeScore(old); m.bad != nil || m.there || !m.make {
		return nil, false, errLeave
	}
	return nil, false, nil
}

// claimAlone is claim where the record cannot be edited in its leaf.
func (c *conn) claimAlone(m *placing) (err error) {
	for try := range maxTries {
		if m.old, m.base, m.there, err = c.member(m.id, m.member); err != nil || m.there || !m.make {
			return err
		}
		mine, err := c.s.tree.PutIf(c.s.ctx, m.key, nil, fieldCond(m.base))
		if !lost(err) {
			m.base = mine
			return err
		}
		pause(try)
	}
	return errContended
}

// decide says what becomes of a member with the score that has been read.
func (m *placing) decide(f zaddFlags) error {
	m.placed = placed{score: m.asked}
	switch {
	case !m.there && f.xx, m.there && f.nx:
		m.refused, m.missed = true, !m.there
		return nil
	case !m.there:
		m.added = true
		return nil
	}
	if f.incr {
		if m.score += m.old; math.IsNaN(m.score) {
			return fault("ERR resulting score is not a number (NaN)")
		}
	}
	if f.gt && m.score <= m.old || f.lt && m.score >= m.old {
		m.refused, m.score = true, m.old
	}
	m.changed = m.score != m.old
	return nil
}

// order puts the places of members, then their scores, then removes the places of the old scores. It
// returns the number of the first member whose score was not put; lost(err): it is another one by now.
func (c *conn) order(ms []*placing) (n int, err error) {
	// Put a place also if it exists: the new version makes a conditional removal by
	// another command fail.
	c.writes = c.writes[:0]
	for _, m := range ms {
		m.at.key = appendPlace(nil, m.id, m.score, m.member)
		c.writes = append(c.writes, btree.Write{Key: m.at.key})
	}
	if _, err := c.runs(func(i int, w *btree.Write) error { ms[i].at.version = w.Version; return w.Err }); err != nil {
		return 0, err
	}
	if err := c.readPlaces(ms); err != nil {
		return 0, err
	}
	c.writes = c.writes[:0]
	for _, m := range ms {
		binary.BigEndian.PutUint64(m.enc[:], scoreBits(m.score))
		c.writes = append(c.writes, btree.Write{Key: m.key, Value: m.enc[:], Cond: btree.IfVersion(m.base)})
	}
	n, err = c.runs(func(i int, w *btree.Write) error {
		if w.Err != nil {
			return w.Err
		}
		base := uint64(0) // a claim is no member: readers take it for absent
		if ms[i].there {
			base = ms[i].base
		}
		m := ms[i]
		*m.into, m.done = append(*m.into, written{m.member, w.Version, base}), true
		return nil
	})
	var leave []placement
	for _, m := range ms[:n] {
		leave = append(leave, m.left(m.at.key)...)
	}
	c.s.leave(c.unplace(leave))
	return n, err
}

// readPlaces reads the places of the scores that members have.
func (c *conn) readPlaces(ms []*placing) error {
	var keys [][]byte
	var of []*placing
	for _, m := range ms {
		if m.leave = (placement{}); m.there {
			m.leave.key = appendPlace(nil, m.id, m.old, m.member)
			keys, of = append(keys, m.leave.key), append(of, m)
		}
	}
	if len(keys) == 0 {
		return nil
	}
	var failed error
	err := c.s.tree.GetMany(c.s.ctx, keys, func(i int, _ []byte, version uint64, err error) {
		if of[i].leave.version = version; err != nil {
			of[i].leave.version = 0
			if !errors.Is(err, btree.ErrNoKey) {
				failed = err
			}
		}
	})
	return cmp.Or(err, failed)
}

// left are the places that the member leaves, but one: those of its old score and of tries that failed.
func (m *placing) left(but []byte) (places []placement) {
	for _, p := range append(m.stale, m.leave) {
		if p.version != 0 && !bytes.Equal(p.key, but) {
			places = append(places, p)
		}
	}
	return places
}

// forsake removes places that failed tries have put, when the member stays as it is. A
// place may be removed only behind a change of the member; so the member is written anew.
func (c *conn) forsake(m *placing) {
	if len(m.stale) == 0 || !m.there {
		return
	}
	binary.BigEndian.PutUint64(m.enc[:], math.Float64bits(m.old))
	_, err := c.s.tree.PutIf(c.s.ctx, m.key, m.enc[:], btree.IfVersion(m.base))
	if err == nil {
		m.leave = placement{}
		err = c.unplace(m.left(appendPlace(nil, m.id, m.old, m.member)))
	}
	c.s.leave(ignoreLost(err)) // readers ignore a place that no score confirms
}

// versionOf is the version of a key, 0 if it is not there.
func (s *Server) versionOf(key []byte) (uint64, error) {
	_, version, err := s.tree.GetVersion(s.ctx, key, nil)
	if errors.Is(err, btree.ErrNoKey) {
		return 0, nil
	}
	return version, err
}

// unplace removes places that still have the version in the list.
//
// Preconditions: the caller has changed the member's score after it put or read the places.
// See invariant 2.
func (c *conn) unplace(places []placement) error {
	c.writes = c.writes[:0]
	for _, p := range places {
		c.writes = append(c.writes, btree.Write{Key: p.key, Remove: true, Cond: btree.IfVersion(p.version)})
	}
	_, err := c.runs(func(_ int, w *btree.Write) error { return ignoreLost(w.Err) })
	return err
}

func zrem(c *conn, a [][]byte) error { return c.removeAll(a, kindZset, c.unmember) }

// unmember removes a member.
func (c *conn) unmember(id uint64, member []byte) (bool, error) {
	for try := range maxTries {
		score, version, there, err := c.member(id, member)
		if err != nil || !there {
			return false, err
		}
		leave := placement{key: appendPlace(nil, id, score, member)}
		if leave.version, err = c.s.versionOf(leave.key); err != nil {
			return false, err
		}
		c.key2 = appendField(c.key2[:0], id, member)
		if err = c.s.tree.DeleteIf(c.s.ctx, c.key2, btree.IfVersion(version)); err == nil {
			c.s.leave(c.unplace([]placement{leave}))
			return true, nil
		}
		if !lost(err) {
			return false, err
		}
		pause(try)
	}
	return false, errContended
}

func zscore(c *conn, a [][]byte) error {
	return c.read(a[1], kindZset, func(id uint64) (missed bool, err error) { return c.score(id, a[2]) })
}

// zmscore is ZMSCORE. The answer is put together anew if any member was missed under an old id.
func zmscore(c *conn, a [][]byte) error {
	return c.read(a[1], kindZset, func(id uint64) (missed bool, err error) {
		c.array(len(a) - 2)
		for _, member := range a[2:] {
			miss, err := c.score(id, member)
			if err != nil {
				return false, err
			}
			missed = missed || miss
		}
		return missed, nil
	})
}

// score answers with the score of a member, or null if it is missed.
func (c *conn) score(id uint64, member []byte) (missed bool, err error) {
	if id == 0 || len(member) > c.s.maxFieldBytes() {
		c.null()
		return false, nil
	}
	score, _, there, err := c.member(id, member)
	if err == nil && !there {
		c.null()
	} else if err == nil {
		c.double(score)
	}
	return !there, err
}
