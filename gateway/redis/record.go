package redis

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/quarrystore/quarry/btree"
)

// This file encodes and decodes the records that a gateway keeps in the tree; their layout is in
// the package comment.

// Databases is how many databases a tree holds.
const Databases = 16

// Families of keys in the tree. The numbers are part of the format; a database's
// own keys start with its number.
const (
	fieldFamily byte = 'f'
	orderFamily byte = 's'
	ownerFamily byte = 'i'
	moveFamily  byte = 'm'
)

const (
	kindNone byte = iota
	kindString
	kindHash
	kindZset

	kindMask byte = 0x07
	flagNew  byte = 0x08 // of a hash or sorted set: not confirmed
	flagRaw  byte = 0x10 // of a string: written in parts, for OBJECT ENCODING
	flagMark byte = 0x20 // the record is a mark of a move
	flagDies byte = 0x40
	flagTime byte = 0x80
	idBytes       = 8
	// headMost is the most that stands before a string's value in its record.
	headMost = 1 + 8
)

// maxValueBytes is the longest string: the largest value of a tree less its head.
const maxValueBytes = btree.MaxValueBytes - headMost

var kindNames = [...]string{kindNone: "none", kindString: "string", kindHash: "hash", kindZset: "zset"}

// errRecord: the tree has something that a gateway did not write.
var errRecord = errors.New("not a record of a gateway: was the tree written by something else?")

// record is what the tree says of a key.
type record struct {
	kind    byte   // kindNone: absent, or past its expiry
	raw     bool   // string written in parts
	dying   bool   // a gateway is about to remove the record, because it has found no fields
	newborn byte   // a hash or sorted set that is not confirmed yet, and counts as absent: its kind
	mark    byte   // if not 0, the record is this mark of a move; see move.go
	move    uint64 // whose mark it is
	expiry  int64  // ms; 0: never
	id      uint64 // of a hash or sorted set, also of one past its expiry
	value   []byte // of a string
	version uint64 // in the tree; 0: the tree does not have it
}

// cond holds while the record is as it was read.
func (r *record) cond() btree.Cond {
	if r.version == 0 {
		return btree.IfAbsent()
	}
	return btree.IfVersion(r.version)
}

// decode reads a record. Strings that are past their expiry have no kind.
func decode(b []byte, version uint64, now int64) (r record, err error) {
	if len(b) == 0 {
		return r, errRecord
	}
	head := b[0]
	b = b[1:]
	r.kind, r.raw, r.dying, r.version = head&kindMask, head&flagRaw != 0, head&flagDies != 0, version
	if head&flagMark != 0 {
		if len(b) != idBytes || r.kind < markLeaving || r.kind > markReplacing {
			return r, errRecord
		}
		return record{mark: r.kind, move: binary.BigEndian.Uint64(b), version: version}, nil
	}
	if head&flagTime != 0 {
		if len(b) < 8 {
			return r, errRecord
		}
		r.expiry = int64(binary.BigEndian.Uint64(b))
		b = b[8:]
	}
	switch r.kind {
	case kindString:
		if head&flagNew != 0 {
			return r, errRecord
		}
		r.value = b
	case kindHash, kindZset:
		if len(b) != idBytes {
			return r, errRecord
		}
		r.id = binary.BigEndian.Uint64(b)
	default:
		return r, fmt.Errorf("kind %d: %w", r.kind, errRecord)
	}
	if head&flagNew != 0 {
		r.newborn, r.kind = r.kind, kindNone
	}
	if head&flagTime != 0 && r.expiry <= now {
		r.kind, r.value = kindNone, nil
	}
	return r, nil
}

// appendHead appends what stands before a record's value. A time before 1970 is
// long past, like 1.
func appendHead(b []byte, kind byte, expiry int64) []byte {
	if expiry == 0 {
		return append(b, kind)
	}
	return binary.BigEndian.AppendUint64(append(b, kind|flagTime), uint64(max(expiry, 1)))
}

// appendRaw is appendHead for a string that is written in parts.
func appendRaw(b []byte, expiry int64) []byte {
	at := len(b)
	b = appendHead(b, kindString, expiry)
	b[at] |= flagRaw
	return b
}

// appendFamily appends the record of a hash or sorted set.
func appendFamily(b []byte, kind byte, expiry int64, id uint64) []byte {
	return binary.BigEndian.AppendUint64(appendHead(b, kind, expiry), id)
}

// appendNewborn appends the record of a hash or sorted set that is not confirmed yet.
func appendNewborn(b []byte, kind byte, expiry int64, id uint64) []byte {
	at := len(b)
	b = appendFamily(b, kind, expiry, id)
	b[at] |= flagNew
	return b
}

// AppendKey appends the tree's key of a key in a database, for programs that fill a tree
// without a gateway.
func AppendKey(dst []byte, db int, key []byte) []byte { return append(append(dst, byte(db)), key...) }

// AppendString appends the tree's value of a string that does not expire.
func AppendString(dst, value []byte) []byte {
	return append(appendHead(dst, kindString, 0), value...)
}

// CutString is the value of a string out of the tree's value; false for what is no
// string, or has expired.
func CutString(b []byte, now time.Time) (value []byte, ok bool, err error) {
	r, err := decode(b, 0, now.UnixMilli())
	return r.value, err == nil && r.kind == kindString, err
}

// appendID begins a tree key of a family with an id.
func appendID(b []byte, family byte, id uint64) []byte {
	return binary.BigEndian.AppendUint64(append(b, family), id)
}

// appendField is the tree key of a field or member.
func appendField(b []byte, id uint64, field []byte) []byte {
	return append(appendID(b, fieldFamily, id), field...)
}

// appendPlace is the tree key of a member's place in the order of its sorted set.
func appendPlace(b []byte, id uint64, score float64, member []byte) []byte {
	return append(binary.BigEndian.AppendUint64(appendID(b, orderFamily, id), orderBits(score)), member...)
}

// orderBits are a score's bits so that they sort as the scores do; -0 is 0.
func orderBits(f float64) uint64 {
	if f == 0 {
		f = 0
	}
	b := math.Float64bits(f)
	if b>>63 != 0 {
		return ^b
	}
	return b | 1<<63
}

// fromOrderBits is the score whose bits were flipped for sorting.
func fromOrderBits(b uint64) float64 {
	if b>>63 != 0 {
		return math.Float64frombits(b &^ (1 << 63))
	}
	return math.Float64frombits(^b)
}

// owner is the record of an id: the key whose hash or sorted set it is. The id lives
// while there is an owner; see family.go.
type owner struct {
	kind      byte   // kindHash or kindZset
	condemned bool   // a gateway is about to remove the id, unless its key names it
	building  bool   // a copy that its key does not name yet
	made      int64  // ms since 1970
	replaces  uint64 // building: the version of the key's record that will be replaced
	db        byte   // of the key
	key       []byte // within db
}

const (
	ownerCondemned byte = 0x40
	ownerBuilding  byte = 0x80
)

// append encodes the owner of an id.
func (o owner) append(b []byte) []byte {
	kind := o.kind
	if o.condemned {
		kind |= ownerCondemned
	}
	if o.building {
		kind |= ownerBuilding
	}
	b = binary.BigEndian.AppendUint64(append(b, kind), uint64(o.made))
	if o.building {
		b = binary.BigEndian.AppendUint64(b, o.replaces)
	}
	return append(append(b, o.db), o.key...)
}

// treeKey is the owner's key in the tree.
func (o owner) treeKey() []byte { return AppendKey(nil, int(o.db), o.key) }

// decodeOwner reads what owner.append has written; its key aliases b.
func decodeOwner(b []byte) (o owner, err error) {
	if len(b) < 10 {
		return o, errRecord
	}
	o = owner{kind: b[0] & kindMask, condemned: b[0]&ownerCondemned != 0, building: b[0]&ownerBuilding != 0, made: int64(binary.BigEndian.Uint64(b[1:]))}
	if b = b[9:]; o.building {
		if len(b) < 9 {
			return o, errRecord
		}
		o.replaces = binary.BigEndian.Uint64(b)
		b = b[8:]
	}
	o.db, o.key = b[0], b[1:]
	return o, nil
}

// after is the first key behind all that start with a prefix; nil if there is none.
func after(prefix []byte) []byte {
	for i := len(prefix) - 1; i >= 0; i-- {
		if prefix[i] != 0xff {
			out := append([]byte(nil), prefix[:i+1]...)
			out[i]++
			return out
		}
	}
	return nil
}

// within is the range of keys that start with a prefix.
func within(prefix []byte) btree.Range { return btree.Range{From: prefix, To: after(prefix)} }
