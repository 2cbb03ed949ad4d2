// Package btree is an ordered key-value store in slabs: a B-link tree whose nodes
// are PAIR or STAGED slabs, as a program over the slab operations Read, Update, Alloc, Free.
// No coordinator, no lock: any number of clients work on a tree, and a client may
// die at any verb.
//
//	shared, err := btree.Make(store, btree.Config{})
//	tree := btree.NewProgram(shared, store)
//	version, err := tree.Put([]byte("ada"), []byte("lovelace"), btree.Cond{})
//	value, version, err := tree.Get([]byte("ada"), nil)
//
// Package btree/kv opens trees by name, through a client.
//
// # A node
//
// The payload of one slab; all numbers little endian, the layout is part of
// the format:
//
//	+0   format:8  level:8  class:8  flags:8  count:16  slots:16
//	+8   stamp:64
//	+16  right sibling, Ref; zero for none
//	+32  low bytes:16  prefix bytes:16  high at:16  waste bytes:16
//	+40  frozen by Ref, its stamp:64; zero: not frozen
//	+64  low fence | slots of 16 bits | heap
//
//	slot         where an entry begins: count slots in the order of keys, then spare ones
//	high fence   | bytes | fence |  in the heap at "high at"; 0: no upper end
//	leaf entry   | suffix bytes | suffix | size | version | value |
//	inner entry  | suffix bytes | suffix | child Ref |
//
// The format is 2. Flags: 1 the dead root of a layer, 2 a leaf that may have entries of layers, 4 (on all nodes
// of a tree, or on none) keys go by the room of STAGED slabs.
// Numbers in the heap are varints. A node holds low <= key < high. All its keys start with the
// prefix, and entries leave it out: as many bytes as both fences share, or fewer. The first entry
// of an inner node stands for the low fence and has no suffix. Level 0 is a leaf.
//
// The size of a value is its bytes << 1. That of an external value is its bytes << 3, with bit 0
// set, and in bits 1 and 2 its codec, which is 0: others are refused. An external value is the Ref
// of a write-once object and its length; of length 0 it is the Ref of a layer.
//
// In the heap, fence and entries lie in any order and do not overlap. Bytes between them that
// belong to nothing are waste. So a change moves nothing: an insert writes head, slots and, at the
// end, its entry; a value that is not longer than the one before is written over it; a removal
// writes head and slots, a freeze the head. Where no slot or no room at the end is left, or waste
// would be more than a quarter of the room, the node is written anew: in order, without waste,
// with spare slots for what else will find room. A node is full when it would be full without
// waste and spare slots.
//
// The stamp rises with every commit of the node; a new right node starts at the
// stamp of the left one, or with that of the newest key in it, an absorbed one hands over the larger. So an entry's
// version, the stamp of its commit, is never given to the same key twice.
//
// # Long keys
//
// A node has room for four entries with keys of Limits.InlineKeyBytes (299 bytes in
// nodes of 4 KiB in PAIR slabs, about as many in nodes of 2 KiB in STAGED slabs). A longer key is cut: its first bytes lead to a layer, a tree for
// the rests of all keys that begin so. See layer.go.
//
// # Invariants
//
//  1. The leaves that are not absorbed, in the order of their right links, divide the range of all
//     keys: each key is in the range of exactly one of them.
//  2. The low fence of a node never changes. The entry of a node in its parent may be missing, and
//     an entry may name a node further left, or one that is freed: entries are hints. What an
//     entry names starts at or before the entry's key, or is freed.
//  3. The root's Ref never changes: the tree grows by copying the root down.
//  4. The leftmost node of a level is never absorbed by a sibling.
//
// # Split
//
//  1. Alloc the right node with the upper part.
//  2. Update the left node: lower part, new high fence, right link. Linearizes here.
//  3. Update the parent: an entry for the right node.
//
// The parts are halves, except where keys come in rising order, in one feed or in many side by side
// (src0042:000000017): there a leaf is cut at the new key, and what is left of it stays full. The
// versions in the leaf tell the order in which its entries were put.
//
// Where several new keys between two neighbours find no room, they are put with the split (SplitRun): 1 makes as many new
// nodes as they need, with the keys in them, 2 shows all of them at once, and 3 adds all entries to the parent.
//
// A client that dies after 1 leaves an orphan. One that dies after 2 leaves the parent
// without the entry: lookups follow the right link, and the first client that has to do so
// adds the entry.
//
// # Merge
//
// L absorbs its right sibling R, by commits of one slab each:
//
//  1. Update R: frozen by (L, stamp of L). From now on no client writes to R.
//  2. Update L, only if it still has that stamp: R's entries, high fence and right
//     link. Linearizes here.
//  3. Update the parent: R's entry goes. Free R.
//
// If L changes between 1 and 2, step 1 has no effect any more: L never has the stamp again that R names,
// and a client that wants to write to R thaws it. While L has that stamp no client thaws R,
// so step 2 takes over exactly what R holds: the two steps act as one reservation of both
// nodes.
//
// A reader of a frozen R checks whether R has been absorbed. It has not if L still has that stamp, or if
// R is still the right link of its left neighbour. The root absorbs an only child in the same way.
//
// # Shift
//
// Compact fills L up with entries of R, where there are too many for a merge. It is a merge and a split of L in one commit:
//
//  1. Update R: frozen, as in a merge.
//  2. Alloc a leaf N with the entries that stay to the right, and R's right link.
//  3. Update L, only if it still has that stamp: its entries and the others of R, the new high fence, and N as right link. Linearizes here.
//  4. Update the parent: R's entry goes, N's comes. Free R.
//
// For others R is absorbed. So keys move to the left only out of a node that is never current again, and who comes to it looks to
// the left once more. A client that meets R between 1 and 3 completes the shift; without memory for N it gives L another
// stamp instead, and thaws R. A client that encrypts has less room than one without keys that died: it makes as many new leaves as it needs, also to thaw R.
//
// # Obligations of the caller
//
// One goroutine at a time uses a Program; Shared is safe for many. Slices given to a callback are valid
// until the callback returns.
package btree
