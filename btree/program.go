package btree

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// This file has what a tree needs of its caller, its limits, and Program, which runs its
// operations.

// Ref names an object; see proto.Ref.
type Ref = proto.Ref

// Store is the slab operations that a tree needs. Errors are those of package slab:
// ErrFreed, ErrUnknown and so on; an error of a callback comes back as it is.
type Store interface {
	// Begin starts an operation that may make objects and name them in others. From the
	// first Alloc of the operation to the next Begin, Alloc and Update act under the
	// session of that Alloc. They fail with an error other than ErrUnknown, and change
	// nothing, once it has ended: an object that its session has not named is an orphan
	// then, and may be freed (slab.Survey).
	Begin()
	// Read appends the payload to dst.
	Read(ref Ref, dst []byte) ([]byte, error)
	// ReadMany calls fn once for each ref, in any order. Payloads are valid during the call of fn.
	ReadMany(refs []Ref, fn func(i int, payload []byte, err error)) error
	// View calls fn with the payload, valid during the call. fn must not use the Store.
	View(ref Ref, fn func(payload []byte) error) error
	// Update replaces the payload by the result of f, atomically.
	Update(ref Ref, f func(old []byte) ([]byte, error)) error
	// Alloc makes an object: a node with room for capacity bytes, or a write-once value.
	Alloc(payload []byte, tag uint32, capacity int, writeOnce bool) (Ref, error)
	Free(ref Ref) error
}

// Tags of the slabs of a tree.
const (
	TagRoot  uint32 = 0x10001
	TagInner uint32 = 0x10002
	TagLeaf  uint32 = 0x10003
	TagValue uint32 = 0x10004
	TagLayer uint32 = 0x10005
)

const (
	// MaxKeyBytes bounds keys, in trees of every node size.
	MaxKeyBytes = 1 << 10
	// MaxInlineBytes is the largest value kept in a leaf.
	MaxInlineBytes = 256
	// MaxValueBytes is the largest value.
	MaxValueBytes = 64 << 20
	// DefaultNodeBytes is the size of a node.
	DefaultNodeBytes = 4 << 10
	minNodeBytes     = 1 << 10
	maxNodeBytes     = 64 << 10
	// maxStagedNodeBytes is the largest node in a STAGED slab: it keeps offsets within a node of one image in 15 bits.
	maxStagedNodeBytes = 16 << 10
	// nodeSlabExtra is what a node's slab has more: R, V and the headers of the images.
	nodeSlabExtra = 64

	// maxTries bounds how often an operation starts again because others changed
	// the tree meanwhile; each try means that another operation was done.
	maxTries = 256
	// maxSteps bounds the nodes of one descent, right links included.
	maxSteps = 4096
	// maxDepth bounds questions that ask for the left neighbour of a left neighbour.
	maxDepth = 64
)

var (
	// ErrNoKey: the tree has no such key.
	ErrNoKey = errors.New("no such key")
	// ErrKeyExists: PutIfAbsent found the key.
	ErrKeyExists = errors.New("key exists")
	// ErrConflict: the key has another value or version.
	ErrConflict = slab.ErrConflict
	// ErrBadKey: a key is empty or too long.
	ErrBadKey = errors.New("bad key")
	// ErrTooLarge: the value is too large.
	ErrTooLarge = slab.ErrTooLarge
	// ErrNoTree: the tree has been dropped.
	ErrNoTree = errors.New("tree has been dropped")
	// ErrBusy: others kept changing the tree until the tries ran out.
	ErrBusy = slab.ErrBusy
)

// Limits of a tree, from the size of its nodes. Four entries with the longest keys
// that stand in a node, and two such fences, fit one node; three of the largest
// entries do, so that a split always helps. Longer keys go to layers.
type Limits struct {
	NodeBytes int `json:"node_bytes"`
	SlabBytes int `json:"slab_bytes"` // of the slab of a node
	// Slab is the kind of that slab: PAIR or STAGED.
	Slab string `json:"slab"`
	Room int    `json:"room"` // bytes for entries, fence and slots in a node
	// InlineKeyBytes: a key takes one node, and a round, more for each so many bytes
	// that it is longer.
	InlineKeyBytes int `json:"inline_key_bytes"`
	MaxKeyBytes    int `json:"max_key_bytes"`
	entry          int // bytes of the largest entry
}

// entryHead is the most that an entry has beside key and value: slot, lengths, version.
const entryHead = 2 + 2 + 2 + 10

// fenceHead is the most that the length of the high fence takes.
const fenceHead = 2

// externalBytes is the most that an external value takes in a leaf.
const externalBytes = proto.RefBytes + 4

// kind of the slabs of the tree's nodes.
func (c *Config) kind() proto.Kind {
	if c.Staged {
		return proto.Staged
	}
	return proto.Pair
}

// limits of nodes that take overhead bytes more in their slabs. Keys stand in nodes or in layers by
// the slabs alone, so that clients with and without encryption agree on it. Three of the
// largest entries fit also with overhead. Trees with STAGED slabs that an earlier build made have nodes without flagWide: they go by the
// room that PAIR slabs of the same size have, and have more entries in a node, not longer ones.
func limits(class proto.Class, kind proto.Kind, wide bool, overhead int) Limits {
	of := proto.Pair
	if wide {
		of = proto.Staged
	}
	free := class.PayloadBytes(of) - headBytes - fenceHead
	// free - 2 key >= 4 (head + key + external); one byte is the mark of a layer
	key := min(MaxKeyBytes, (free-4*(entryHead+externalBytes))/6)
	return Limits{NodeBytes: class.Bytes() - nodeSlabExtra, SlabBytes: class.Bytes(), Slab: kind.String(), Room: class.PayloadBytes(kind) - overhead, InlineKeyBytes: key - 1, MaxKeyBytes: MaxKeyBytes, entry: (free - overhead - 2*key) / 3}
}

// Shared is what the Programs of one tree in one process share. It is safe for many goroutines:
// all fields but the contents of cache, stats and whole never change.
type Shared struct {
	root   Ref         // of the tree; never changes
	class  proto.Class // of the slabs of its nodes
	wide   bool        // its nodes have flagWide
	limits Limits      // that follow from class and kind
	cache  *Cache      // of inner nodes
	stats  counters    // of structural changes
	// readOnly: operations repair nothing.
	readOnly bool
	fill     int    // per cent of a node that Load fills
	whole    *whole // leaves that need not be examined again
}

// counters of structural changes; the client counts calls, rounds and verbs.
type counters struct {
	layers, splits, splitsAtKey, grows, merges, shifts, shrinks, posted, unlinked, thawed, rightSteps, restarts atomic.Uint64
}

// Root is the tree's root, for the placement library.
func (s *Shared) Root() Ref { return s.root }

// Limits of the tree's keys.
func (s *Shared) Limits() Limits { return s.limits }

// CacheStats of the inner nodes.
func (s *Shared) CacheStats() CacheStats { return s.cache.Stats() }

// Changes counts what this process has done to the tree's structure.
func (s *Shared) Changes() map[string]uint64 {
	c := &s.stats
	return map[string]uint64{"layers": c.layers.Load(), "splits": c.splits.Load(), "splits_at_key": c.splitsAtKey.Load(), "grows": c.grows.Load(), "merges": c.merges.Load(), "shifts": c.shifts.Load(), "shrinks": c.shrinks.Load(),
		"posted": c.posted.Load(), "unlinked": c.unlinked.Load(), "thawed": c.thawed.Load(), "right_steps": c.rightSteps.Load(), "restarts": c.restarts.Load()}
}

// Config of a tree. The zero value is good.
type Config struct {
	// NodeBytes is the size of nodes: a power of two from 1 KiB to 64 KiB; 0 means 4 KiB.
	// Their slabs have 64 B more. Part of the tree: for Create only.
	NodeBytes int
	// Staged: the nodes lie in STAGED slabs, which have one image where others have two, so that a node has twice
	// the room. Part of the tree: Make and Attach must be given the same value, and the Store must allocate nodes so.
	// Package kv fills it in.
	Staged bool
	// CacheBytes bounds the inner nodes kept in this process; 0 means 32 MiB,
	// negative none.
	CacheBytes int
	// ReadOnly: the session cannot write; no repair is done in passing.
	ReadOnly bool
	// Overhead is by how many bytes a payload is longer in its slab: client.Client.PayloadOverhead, which
	// package kv fills in.
	Overhead int
	// Seed is of the hashes of leaves (whole), random and kept in this process, which package kv fills in.
	Seed uint64
	// Fill is the share of a node, in percent, that Load fills: 50 to 100; 0 means 90,
	// so that the first puts do not split every node.
	Fill int
}

// DefaultFill is Config.Fill unless set.
const DefaultFill = 90

// fill is Config.Fill, or its default.
func (c Config) fill() (int, error) {
	if c.Fill == 0 {
		return DefaultFill, nil
	}
	if c.Fill < 50 || c.Fill > 100 {
		return 0, fmt.Errorf("btree: fill of %d %%: want 50 to 100", c.Fill)
	}
	return c.Fill, nil
}

// class is the size class of the nodes' slabs.
func (c Config) class() (proto.Class, error) {
	if c.NodeBytes == 0 {
		c.NodeBytes = DefaultNodeBytes
	}
	k, ok := NodeClass(c.NodeBytes)
	if c.Staged && c.NodeBytes > maxStagedNodeBytes {
		return 0, fmt.Errorf("btree: nodes of %d bytes: want at most %d in STAGED slabs", c.NodeBytes, maxStagedNodeBytes)
	}
	if !ok {
		return 0, fmt.Errorf("btree: nodes of %d bytes: want a power of two from %d to %d", c.NodeBytes, minNodeBytes, maxNodeBytes)
	}
	return k, nil
}

// NodeClass is the class of the slabs of nodes of a size; false unless it is a power of two
// from 1 KiB to 64 KiB.
func NodeClass(nodeBytes int) (proto.Class, bool) {
	if nodeBytes < minNodeBytes || nodeBytes > maxNodeBytes || nodeBytes&(nodeBytes-1) != 0 {
		return 0, false
	}
	return proto.ClassOf(nodeBytes + nodeSlabExtra)
}

// newShared is what Programs of a tree with this root share.
func newShared(root Ref, class proto.Class, wide bool, cfg Config, fill int) *Shared {
	n := cfg.CacheBytes
	if n == 0 {
		n = DefaultCacheBytes
	}
	return &Shared{root: root, class: class, wide: wide, limits: limits(class, cfg.kind(), wide, cfg.Overhead), cache: newCache(max(0, n), class.PayloadBytes(cfg.kind())), readOnly: cfg.ReadOnly, fill: fill, whole: &whole{seed: cfg.Seed}}
}

// Make allocates an empty tree: one leaf, the root.
func Make(s Store, cfg Config) (*Shared, error) {
	class, err := cfg.class()
	if err != nil {
		return nil, err
	}
	fill, err := cfg.fill()
	if err != nil {
		return nil, err
	}
	n := node{class: class, wide: cfg.Staged}
	room := limits(class, cfg.kind(), n.wide, cfg.Overhead).Room
	root, err := s.Alloc(n.encode(nil, room), TagRoot, room, false)
	if err != nil {
		return nil, err
	}
	return newShared(root, class, n.wide, cfg, fill), nil
}

// Attach opens the tree with a root.
func Attach(s Store, root Ref, cfg Config) (*Shared, error) {
	fill, err := cfg.fill()
	if err != nil {
		return nil, err
	}
	b, err := s.Read(root, nil)
	if errors.Is(err, slab.ErrFreed) {
		return nil, ErrNoTree
	} else if err != nil {
		return nil, err
	}
	v, err := open(b)
	if err != nil {
		return nil, err
	}
	if _, ok := NodeClass(v.class.Bytes() - nodeSlabExtra); !ok {
		return nil, corrupt("root of class %d", v.class)
	}
	if v.wide() && !cfg.Staged {
		return nil, corrupt("root with the keys of STAGED slabs in a PAIR slab")
	}
	return newShared(root, v.class, v.wide(), cfg, fill), nil
}

// page is a node as READ, which belongs to one Program, or as cached. All Programs of the
// tree share a cached node, and only its atomics change.
type page struct {
	// What a descent through the cache looks at comes first, in four cache lines that
	// can be asked for at once; see indexed.
	ref    Ref
	index  []uint64    // groups of beginnings and children; see indexed. nil: not cached
	shared uint16      // prefix
	kids   uint16      // count
	height uint8       // level
	cached bool        // taken from the cache: it may be out of date
	used   atomic.Bool // since another node was stored in its set
	gone   atomic.Bool // from the cache
	_      [8]byte
	lead   []byte             // of all separators of a cached node, without the prefix
	far    []uint64           // first beginnings of the groups of a node that has many
	space  [16]byte           // of lead
	near   [nearGroups]uint64 // the first beginning of each group, or else they are in far

	// Of a cached node: its children as far as they are inner nodes and have been looked
	// for, and the word that leads to the node itself.
	below []atomic.Pointer[page]
	above atomic.Pointer[atomic.Pointer[page]]

	view
	buf     []byte   // memory of view; kept for the next node
	version uint64   // of the object, where the Program's store tells it
	_       [16]byte // to 512: the allocator puts objects of that size on lines of their own
}

// Program runs operations on a tree, one at a time. One goroutine at a time uses it, and owns all
// fields but *Shared.
type Program struct {
	*Shared
	root     Ref                          // of the present layer
	floor    uint64                       // all versions in the present layer are above
	lower    *Program                     // for the layers below; nil before the first
	mark     []byte                       // scratch: key of the entry that leads to a layer
	store    Store                        // the slabs; see Store
	versions Watching                     // store, if nodes are read with their versions; else nil
	pages    []*page                      // not in use
	lent     []*page                      // in use by the present operation
	depth    int                          // of nested finds
	repairs  []repair                     // splits and merges of others to complete at the end of the operation
	w        write                        // the present write; apply runs it
	apply    func([]byte) ([]byte, error) // w.apply, bound once
	groups   groups                       // the present WriteGroup or WriteGroups
	glance   glance                       // the present look at a leaf
	batch    []Write                      // scratch of operations on many keys
	out      []byte                       // scratch: an encoded node
	enc      []byte                       // scratch: an encoded entry
	hits     uint64                       // of the cache, not yet added to its counters
	touched  uint64                       // see route
}

// NewProgram makes a program on a store.
func NewProgram(s *Shared, store Store) *Program {
	p := &Program{Shared: s, root: s.root, store: store}
	p.apply = p.w.apply
	p.groups.p, p.groups.apply, p.groups.each = p, p.groups.one, p.groups.run
	p.glance.look = p.glance.run
	return p
}

// begin starts an operation; end does the repairs that it noted and gives its pages back.
func (p *Program) begin() {
	p.root, p.floor, p.depth = p.Shared.root, 0, 0
	p.repairs = p.repairs[:0]
}

// end does the repairs that the operation has noted, gives its pages back, and adds its counts.
func (p *Program) end() {
	if len(p.repairs) > 0 && !p.readOnly {
		p.repairAll()
	}
	if p.hits >= hitsAtOnce {
		p.cache.hits.Add(p.hits)
		p.hits = 0
	}
	p.giveBack()
	p.w.key, p.w.value, p.w.cond.value = nil, nil, nil // the caller's
}

// hitsAtOnce is how many hits of the cache are added with one atomic instruction, which has to
// wait for all outstanding loads.
const hitsAtOnce = 64

// giveBack makes all pages of the operation free for other nodes.
func (p *Program) giveBack() {
	p.pages = append(p.pages, p.lent...)
	p.lent = p.lent[:0]
}

// page is memory for a node, valid until giveBack.
func (p *Program) page() *page {
	if n := len(p.pages); n > 0 {
		pg := p.pages[n-1]
		p.pages = p.pages[:n-1]
		p.lent = append(p.lent, pg)
		return pg
	}
	pg := &page{buf: make([]byte, 0, p.limits.Room)}
	p.lent = append(p.lent, pg)
	return pg
}

// read reads a node. Inner nodes are checked whole and go into the cache.
func (p *Program) read(ref Ref) (*page, error) {
	pg, err := p.page(), error(nil)
	b := pg.buf[:0]
	if p.versions != nil {
		b, pg.version, err = p.versions.ReadVersion(ref, b)
	} else {
		b, err = p.store.Read(ref, b)
	}
	if err != nil {
		return nil, err
	}
	return pg, p.take(pg, ref, b)
}

// take fills a page with the node that has been read.
func (p *Program) take(pg *page, ref Ref, b []byte) (err error) {
	pg.ref, pg.buf, pg.cached = ref, b, false
	if pg.view, err = parse(b); err == nil && pg.level > 0 {
		if err = pg.valid(); err == nil {
			p.cache.store(pg)
		}
	}
	if err != nil {
		return fmt.Errorf("%v: %w", ref, err)
	}
	return nil
}

// checkKey refuses keys of no length, and those above MaxKeyBytes.
func (p *Program) checkKey(key []byte) error {
	if len(key) == 0 || len(key) > MaxKeyBytes {
		return fmt.Errorf("%w: %d bytes, want 1 to %d", ErrBadKey, len(key), MaxKeyBytes)
	}
	return nil
}

// freed says that an operation did nothing because its object has been freed. An unknown outcome
// does not count as freed, even if its cause is that the object has been freed since.
func freed(err error) bool { return errors.Is(err, slab.ErrFreed) && !unknown(err) }
