package redis

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// This file has RENAME and RENAMENX.

// RENAME changes two keys at one instant. A move is its record in the tree, and a mark in
// the place of the record of each key:
//
//  1. Put the record of the move: both keys, what each has, and its version.
//  2. Replace the destination's record by a mark that names the move.
//  3. Replace the source's record by a mark, only if it still has its version.
//  4. Put the source's record at the destination; remove the source's mark.
//  5. Remove the record of the move.
//
// Linearizes at: step 3. It has happened exactly if the source has the mark, or the
// destination's mark has gone again without being taken back.
//
// A command that meets a mark carries on: with step 3 if the source has its version,
// with step 4 if the source has its mark. If the source has another version, step 3
// cannot happen any more, and the mark at the destination is replaced by what was there.
// A gateway that stops in the middle therefore blocks no other command. Each step happens
// once, because it names the version that it replaces, and versions are never used again.
//
// A hash or sorted set keeps its id; the record of the id's owner follows in step 4.

// Marks, in the place of a kind.
const (
	markLeaving   byte = 1 // of a source
	markArriving  byte = 2 // of a destination that had no record
	markReplacing byte = 3 // of a destination that had one
)

// appendMark encodes the mark that stands in the place of a key's record.
func appendMark(b []byte, mark byte, id uint64) []byte {
	return binary.BigEndian.AppendUint64(append(b, flagMark|mark), id)
}

// States of a move. What the marks say comes first: the state tells the gateway that began
// the move how others have ended it.
const (
	movePending byte = iota
	moveDone
	moveCancelled
)

// move is the record of a move.
type move struct {
	id                     uint64 // random; both marks carry it
	version                uint64 // of the record
	state                  byte   // for the gateway that began the move; the marks decide
	made                   int64  // ms
	srcVersion, dstVersion uint64 // of the keys' records when the move began; 0: no record
	src, dst               []byte // keys of the tree
	rec                    []byte // the source's record
	old                    []byte // the destination's, if dstVersion is not 0
}

const moveHead = 1 + 3*8 + 2*2 + 4

// bytes is the length of the record of the move.
func (m *move) bytes() int { return moveHead + len(m.src) + len(m.dst) + len(m.rec) + len(m.old) }

// append encodes the record; the layout is in the package comment.
func (m *move) append(b []byte) []byte {
	b = append(b, m.state)
	b = binary.BigEndian.AppendUint64(b, uint64(m.made))
	b = binary.BigEndian.AppendUint64(b, m.srcVersion)
	b = binary.BigEndian.AppendUint64(b, m.dstVersion)
	b = binary.BigEndian.AppendUint16(b, uint16(len(m.src)))
	b = binary.BigEndian.AppendUint16(b, uint16(len(m.dst)))
	b = binary.BigEndian.AppendUint32(b, uint32(len(m.rec)))
	return append(append(append(append(b, m.src...), m.dst...), m.rec...), m.old...)
}

// decodeMove reads what move.append has written; its slices alias b. The record's key and version are the caller's
// to set.
func decodeMove(b []byte) (m move, err error) {
	if len(b) < moveHead {
		return m, errRecord
	}
	m = move{state: b[0], made: int64(binary.BigEndian.Uint64(b[1:])), srcVersion: binary.BigEndian.Uint64(b[9:]), dstVersion: binary.BigEndian.Uint64(b[17:])}
	src, dst, rec := int(binary.BigEndian.Uint16(b[25:])), int(binary.BigEndian.Uint16(b[27:])), int(binary.BigEndian.Uint32(b[29:]))
	if b = b[moveHead:]; src+dst+rec > len(b) {
		return m, errRecord
	}
	m.src, m.dst, m.rec, m.old = b[:src], b[src:src+dst], b[src+dst:src+dst+rec], b[src+dst+rec:]
	return m, nil
}

// key is where the record is in the tree.
func (m *move) key() []byte { return appendID(nil, moveFamily, m.id) }

// marks says whether a record is a mark of the move.
func (m *move) marks(r *record) bool { return r.mark != 0 && r.move == m.id }

// peek reads a record of the tree. It does not carry on the move of a mark.
func (s *Server) peek(ctx context.Context, key []byte) (r record, raw []byte, err error) {
	raw, version, err := s.tree.GetVersion(ctx, key, nil)
	if errors.Is(err, btree.ErrNoKey) {
		return record{}, nil, nil
	} else if err != nil {
		return r, nil, err
	}
	r, err = decode(raw, version, 0)
	return r, raw, err
}

// readMove reads the record of a move, nil if there is none.
func (s *Server) readMove(ctx context.Context, id uint64) (*move, error) {
	raw, version, err := s.tree.GetVersion(ctx, appendID(nil, moveFamily, id), nil)
	if errors.Is(err, btree.ErrNoKey) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	m, err := decodeMove(raw)
	m.id, m.version = id, version
	return &m, err
}

// settle carries on the move of which r, at key, is a mark.
func (s *Server) settle(ctx context.Context, key []byte, r *record) error {
	m, err := s.readMove(ctx, r.move)
	if err != nil {
		return err
	}
	if m == nil {
		// The move has ended, or a sweep has given it up before this mark was put: then
		// the source has another version, and the mark replaced nothing.
		if r.mark == markArriving {
			err = ignoreLost(s.tree.DeleteIf(ctx, key, r.cond()))
		}
		return err
	}
	_, err = s.carry(ctx, m, false)
	return err
}

// outcome of a move.
type outcome uint8

const (
	outcomeNone  outcome = iota // no mark is there: the move has ended, or not begun
	outcomeMoved                // done
	outcomeLeft                 // cancelled: the source had changed
)

// carry carries a move on to its end. mine says that the caller has begun the move and
// needs no note of its end in the record.
func (s *Server) carry(ctx context.Context, m *move, mine bool) (outcome, error) {
	for try := range maxTries {
		src, _, err := s.peek(ctx, m.src)
		if err != nil {
			return outcomeNone, err
		}
		if m.marks(&src) {
			if !mine {
				if err := s.note(ctx, m, moveDone); err != nil {
					return outcomeNone, err
				}
			}
			return outcomeMoved, s.arrive(ctx, m, src.cond(), 0)
		}
		dst, _, err := s.peek(ctx, m.dst)
		if err != nil || !m.marks(&dst) {
			return outcomeNone, err
		}
		if src.version == m.srcVersion {
			// Linearizes the RENAME.
			_, err = s.tree.PutIf(ctx, m.src, appendMark(nil, markLeaving, m.id), src.cond())
			if err != nil && !lost(err) {
				return outcomeNone, err
			}
			pause(try)
			continue
		}
		// The source was read first, so it had changed while this mark was there.
		if !mine {
			if err := s.note(ctx, m, moveCancelled); err != nil {
				return outcomeNone, err
			}
		}
		if dst.mark == markArriving {
			err = s.tree.DeleteIf(ctx, m.dst, dst.cond())
		} else {
			_, err = s.tree.PutIf(ctx, m.dst, m.old, dst.cond())
		}
		return outcomeLeft, ignoreLost(err)
	}
	return outcomeNone, errContended
}

// note records in the move how it ends, before its marks are removed.
func (s *Server) note(ctx context.Context, m *move, state byte) error {
	if m.state == state {
		return nil
	}
	m.state = state
	_, err := s.tree.PutIf(ctx, m.key(), m.append(nil), btree.IfVersion(m.version))
	return ignoreLost(err)
}

// arrive is step 4. leaving is the condition that the source's mark is there; mark is the
// version of the destination's, 0 if it has to be looked up.
func (s *Server) arrive(ctx context.Context, m *move, leaving btree.Cond, mark uint64) error {
	rec, err := decode(m.rec, 0, 0)
	if err == nil && rec.id != 0 {
		err = s.follow(ctx, m, rec.id)
	}
	if err != nil {
		return err
	}
	if mark == 0 {
		dst, _, err := s.peek(ctx, m.dst)
		if err != nil {
			return err
		}
		if m.marks(&dst) {
			mark = dst.version
		}
	}
	if mark != 0 {
		_, err := s.tree.PutIf(ctx, m.dst, m.rec, btree.IfVersion(mark))
		if err != nil && !lost(err) {
			return err
		}
		if err == nil {
			s.noteTime(m.rec)
			if m.dstVersion != 0 {
				if old, err := decode(m.old, 0, 0); err == nil && old.id != 0 {
					s.later(old.id)
				}
			}
		}
	}
	return ignoreLost(s.tree.DeleteIf(ctx, m.src, leaving))
}

// follow makes the destination the owner of the id. The owner is read before the source's
// mark: while the mark is there the id cannot have been moved back to the source.
func (s *Server) follow(ctx context.Context, m *move, id uint64) error {
	for try := range maxTries {
		o, version, err := s.owner(ctx, id)
		if err != nil || version == 0 || !bytes.Equal(o.treeKey(), m.src) {
			return err
		}
		src, _, err := s.peek(ctx, m.src)
		if err != nil || !m.marks(&src) {
			return err
		}
		next := owner{kind: o.kind, made: o.made, db: m.dst[0], key: m.dst[1:]}
		_, err = s.tree.PutIf(ctx, appendID(nil, ownerFamily, id), next.append(nil), btree.IfVersion(version))
		if !lost(err) {
			return err
		}
		pause(try)
	}
	return errContended
}

// reapEmpty removes the key that c.key names, with its record r, if it is a hash or sorted set
// without fields. It says whether it was empty.
func (c *conn) reapEmpty(r *record) (bool, error) {
	if r.id == 0 {
		return false, nil
	}
	empty, err := c.s.empty(c.s.ctx, r.id, r.kind)
	if err == nil && empty {
		err = c.s.reap(c.s.ctx, bytes.Clone(c.key), r.id)
	}
	return empty, err
}

// move moves a key. fresh: only to a key that does not exist; false then if it does.
func (c *conn) move(from, to []byte, fresh bool) (bool, error) {
	for try := range maxTries {
		r, err := c.load(from)
		switch {
		case err != nil:
			return false, err
		case r.kind == kindNone:
			return false, errNoSuchKey
		case bytes.Equal(from, to):
			return !fresh, nil
		}
		if empty, err := c.reapEmpty(&r); err != nil {
			return false, err
		} else if empty {
			pause(try)
			continue
		}
		m := &move{made: c.now, srcVersion: r.version, src: bytes.Clone(c.key), rec: bytes.Clone(c.raw)}
		old, err := c.load(to)
		if err == nil && fresh && old.kind != kindNone {
			// Both keys existed at one instant if the source has not changed.
			if changed, err := c.changed(from, r.version); !changed {
				return false, err
			}
			pause(try)
			continue
		}
		if err != nil {
			return false, err
		}
		if fresh && old.newborn != 0 {
			if err := c.decide(&old); err != nil {
				return false, err
			}
			continue
		}
		m.dst, m.dstVersion = bytes.Clone(c.key), old.version
		mark := markArriving
		if old.version != 0 {
			mark, m.old = markReplacing, bytes.Clone(c.raw)
		}
		if ok, err := c.moveOnce(m, mark, old.cond()); ok || err != nil {
			return ok, err
		}
		pause(try)
	}
	return false, errContended
}

// moveOnce runs the move m, by a record of the move or, where that would be too long, without one. False without an
// error: the source or the destination has changed.
func (c *conn) moveOnce(m *move, mark byte, cond btree.Cond) (bool, error) {
	if m.bytes() > btree.MaxValueBytes {
		return c.moveLong(m)
	}
	end, err := c.runMove(m, mark, cond)
	return err == nil && end == outcomeMoved, err
}

// changed says whether a key's record no longer has a version; false beside an error.
func (c *conn) changed(key []byte, version uint64) (bool, error) {
	now, err := c.load(key)
	return err == nil && now.version != version, err
}

// runMove is the move m from its record to its end. mark is of the destination, whose record
// meets cond. outcomeLeft: the source or the destination has changed.
func (c *conn) runMove(m *move, mark byte, cond btree.Cond) (outcome, error) {
	if err := c.beginMove(m); err != nil {
		return outcomeNone, err
	}
	placed, err := c.s.tree.PutIf(c.s.ctx, m.dst, appendMark(nil, mark, m.id), cond)
	if err != nil && !lost(err) {
		return outcomeNone, err // the sweep removes the record of the move, and the mark if there is one
	}
	end := outcomeLeft
	if err == nil {
		c.did.unsettled = true // others may carry it on
		if end, err = c.finish(m, placed); err != nil {
			// The record of the move stays while there may be a mark.
			if end == outcomeMoved {
				c.s.leave(err)
				return outcomeMoved, nil
			}
			c.did.unsettled = end == outcomeNone
			return end, err
		}
		c.did.unsettled = false
	}
	c.s.leave(ignoreLost(c.s.tree.Delete(c.s.ctx, m.key())))
	return end, nil
}

// beginMove is step 1, under a new id.
func (c *conn) beginMove(m *move) error {
	for range maxTries {
		m.id = c.s.random()
		_, err := c.s.tree.PutIf(c.s.ctx, m.key(), m.append(nil), btree.IfAbsent())
		if !lost(err) {
			return err
		}
	}
	return errContended
}

// finish carries on a move of this gateway, and says how it ended. mark is the version of
// the destination's mark.
func (c *conn) finish(m *move, mark uint64) (outcome, error) {
	// Linearizes the RENAME.
	leaving, err := c.s.tree.PutIf(c.s.ctx, m.src, appendMark(nil, markLeaving, m.id), btree.IfVersion(m.srcVersion))
	if err == nil {
		return outcomeMoved, c.s.arrive(c.s.ctx, m, btree.IfVersion(leaving), mark)
	} else if !lost(err) {
		return outcomeNone, err
	}
	// Others have carried it on, or the source has changed.
	end, err := c.s.carry(c.s.ctx, m, true)
	if err != nil || end != outcomeNone {
		return end, err
	}
	// They have ended it, and noted how.
	now, err := c.s.readMove(c.s.ctx, m.id)
	switch {
	case err != nil:
		return end, err
	case now != nil && now.state == moveDone:
		return outcomeMoved, nil
	case now != nil && now.state == moveCancelled:
		return outcomeLeft, nil
	}
	return end, errors.New("a sweep has ended the move")
}

// moveLong is move for strings that do not fit the record of a move: a copy, then the
// removal of the source. Others may see both. If the source changes meanwhile the copy is
// taken back, unless another command has changed it.
func (c *conn) moveLong(m *move) (bool, error) {
	cond := btree.IfAbsent()
	if m.dstVersion != 0 {
		cond = btree.IfVersion(m.dstVersion)
	}
	mine, err := c.s.tree.PutIf(c.s.ctx, m.dst, m.rec, cond)
	if err != nil {
		return false, ignoreLost(err)
	}
	c.did.unsettled = true
	err = c.s.tree.DeleteIf(c.s.ctx, m.src, btree.IfVersion(m.srcVersion))
	if err == nil || errors.Is(err, client.ErrUnknown) {
		return err == nil, err
	}
	var back error
	if m.dstVersion != 0 {
		_, back = c.s.tree.PutIf(c.s.ctx, m.dst, m.old, btree.IfVersion(mine))
	} else {
		back = c.s.tree.DeleteIf(c.s.ctx, m.dst, btree.IfVersion(mine))
	}
	if back == nil {
		c.did.unsettled = false
	}
	return false, errors.Join(ignoreLost(err), ignoreLost(back))
}

// giveUp ends a move whose gateway has died or was suspended. If the marks are not there yet, it makes
// the steps fail that would put them: step 2 over a record,
// and step 3, name versions that it replaces by others with the same record.
func (s *Server) giveUp(ctx context.Context, m *move) error {
	for try := range maxTries {
		end, err := s.carry(ctx, m, false)
		if err != nil {
			return err
		}
		if end == outcomeNone {
			_, err := s.touch(ctx, m.src, m.srcVersion)
			if err == nil {
				_, err = s.touch(ctx, m.dst, m.dstVersion)
			}
			if err != nil {
				return err
			}
			src, _, err := s.peek(ctx, m.src)
			if err != nil {
				return err
			}
			dst, _, err := s.peek(ctx, m.dst)
			if err != nil {
				return err
			}
			if m.marks(&src) || m.marks(&dst) || src.version == m.srcVersion || m.dstVersion != 0 && dst.version == m.dstVersion {
				pause(try)
				continue // another gateway has changed a record meanwhile
			}
		}
		return ignoreLost(s.tree.Delete(ctx, m.key()))
	}
	return errContended
}

// touch gives a record another version, if it has that one, and says whether it did.
func (s *Server) touch(ctx context.Context, key []byte, version uint64) (bool, error) {
	r, raw, err := s.peek(ctx, key)
	if err != nil || r.version != version || version == 0 {
		return false, err
	}
	_, err = s.tree.PutIf(ctx, key, raw, btree.IfVersion(version))
	return err == nil, ignoreLost(err)
}

// ignoreLost is err, or nil where a condition failed because of another change; see lost.
func ignoreLost(err error) error {
	if lost(err) {
		return nil
	}
	return err
}
