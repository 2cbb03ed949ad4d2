package client

import (
	"context"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Ref names one object for ever: the address of its slab, and which of the objects that ever
// used the slab is meant. See proto.Ref.
type Ref = proto.Ref

// MaxReplicas is the largest number of replicas that a program may ask for. While replicas are
// replaced, a region lists more for a time: slab.MaxListed.
const MaxReplicas = 3

// AllocOptions of one object. The zero value asks for a mutable object that is as large as
// its first payload, with the replicas and durability of the Config.
type AllocOptions struct {
	// WriteOnce objects cannot be updated. They take half the memory.
	WriteOnce bool
	// Slab of a mutable object: PairSlab or StagedSlab; 0 means Config.Slab.
	Slab SlabKind
	// Tag is a number of the caller's own, at most proto.MaxUserTag (18 bits). Stat and
	// ReadInfo return it.
	Tag uint32
	// Capacity is the size of the largest later payload in bytes. 0 means the room that
	// the slab for the first payload happens to have.
	Capacity int
	// Replicas of the object's region, 1 to 3; 0 means Config.Replicas.
	Replicas int
	// Durability of the object's region; 0 means Config.Durability.
	Durability Durability
}

// Durability of an object says which losses its acknowledged changes survive.
type Durability uint8

const (
	// Volatile objects with R replicas survive the loss of R-1 storage nodes.
	Volatile Durability = iota + 1
	// Durable objects also survive the loss of all power: each change is flushed to
	// persistent memory or disk before it is acknowledged.
	Durable
)

func (d Durability) String() string {
	return map[Durability]string{0: "default", Volatile: "volatile", Durable: "durable"}[d]
}

// Info describes an object as it was at one moment.
type Info struct {
	Version   uint64 `json:"version"` // from 1; rises with every change
	Born      uint64 `json:"born"`    // distinguishes the objects that have used the slab
	Tag       uint32 `json:"tag"`     // AllocOptions.Tag
	Bytes     int64  `json:"bytes"`   // length of the payload
	Chunks    int    `json:"chunks"`  // slabs of a large object beside its first; else 0
	WriteOnce bool   `json:"write_once"`
	// Slab that the object lies in, as Stat finds it; 0 where it was not looked at.
	Slab SlabKind `json:"slab,omitempty"`
}

// Alloc makes an object with a first payload of 0 B to MaxObjectBytes and returns its Ref.
// The store keeps no other copy of the Ref: an object whose Ref is lost stays allocated. The command quarry
// slab list finds such objects by the session that wrote them.
//
// Errors: ErrNoSpace, ErrTooLarge, ErrArgument, ErrReadOnly, ErrUnreachable. After ErrUnknown
// an object may have been made whose Ref is not known.
func (c *Client) Alloc(ctx context.Context, payload []byte, o AllocOptions) (Ref, error) {
	if err := c.checkAlloc(payload, &o); err != nil {
		return Ref{}, err
	}
	l, err := c.lane(ctx, KindAlloc)
	if err != nil {
		return Ref{}, err
	}
	ref, err := l.allocObject(payload, o)
	c.done(l, err)
	return ref, err
}

// learnDefaults records the cluster's defaults as a controller has sent them.
func (c *Client) learnDefaults(replicas uint32) {
	if replicas >= 1 && replicas <= MaxReplicas {
		c.clusterReplicas.Store(replicas)
	}
}

// defaultReplicas is the number of replicas of an object whose AllocOptions name none.
func (c *Client) defaultReplicas() int {
	if c.cfg.Replicas != 0 {
		return c.cfg.Replicas
	}
	return max(1, int(c.clusterReplicas.Load()))
}

// AllocDefaults are the options of objects whose AllocOptions name none: those of the Config, and where it names
// none the cluster's replicas, as a controller has sent them last.
func (c *Client) AllocDefaults() AllocOptions {
	return AllocOptions{Replicas: c.defaultReplicas(), Durability: c.cfg.Durability, Slab: c.cfg.Slab}
}

// checkAlloc checks the arguments of Alloc and fills in the defaults.
func (c *Client) checkAlloc(payload []byte, o *AllocOptions) error {
	if o.Replicas == 0 {
		o.Replicas = c.defaultReplicas()
	}
	if o.Durability == 0 {
		o.Durability = c.cfg.Durability
	}
	if o.Tag > proto.MaxUserTag {
		return fmt.Errorf("%w: tag %d: want at most %d", ErrArgument, o.Tag, proto.MaxUserTag)
	}
	if o.Replicas < 1 || o.Replicas > MaxReplicas {
		return fmt.Errorf("%w: %d replicas: want 1 to %d", ErrArgument, o.Replicas, MaxReplicas)
	}
	if o.Durability > Durable {
		return fmt.Errorf("%w: durability %d: want Volatile or Durable", ErrArgument, o.Durability)
	}
	if n := max(len(payload), o.Capacity); n > MaxObjectBytes {
		return fmt.Errorf("%w: %d bytes, an object holds at most %d", ErrTooLarge, n, MaxObjectBytes)
	}
	return checkSlab(o, c.cfg.Slab)
}

// Read appends the object's payload to dst. One round; two for a large object.
//
// Errors: ErrFreed, ErrBadRef, ErrNoRegion, ErrCorrupt, ErrUnreachable, ErrBusy if writers
// changed the object during every attempt.
func (c *Client) Read(ctx context.Context, ref Ref, dst []byte) ([]byte, error) {
	l, err := c.laneFor(ctx, KindRead, ref)
	if err != nil {
		return dst, err
	}
	out, _, _, err := l.readObject(ref, dst)
	c.done(l, err)
	return out, err
}

// View calls fn with the object's payload in the Client's own memory: Read without the copy.
// The payload is valid until fn returns. fn must not use the Client. It may run for any time
// and delays no other client. View returns the error of fn as it is; the errors are else those of Read.
func (c *Client) View(ctx context.Context, ref Ref, fn func(payload []byte) error) error {
	l, err := c.laneFor(ctx, KindRead, ref)
	if err != nil {
		return err
	}
	b, err := l.viewObject(ref)
	if err != nil {
		c.done(l, err)
		return err
	}
	l.finish(nil) // fn needs the lane's scratch memory and nothing else of the call
	err = fn(b)
	l.session.release(l)
	return err
}

// ReadAt reads len(p) bytes of the payload, from offset on, into p. Like io.ReaderAt it
// returns the number of bytes read, and io.EOF if the payload ends before offset+len(p). All
// bytes are of one version. Of a large object only the chunks with the range are read.
//
// Errors: those of Read, and ErrArgument for a negative offset.
func (c *Client) ReadAt(ctx context.Context, ref Ref, p []byte, offset int64) (int, error) {
	if offset < 0 {
		return 0, fmt.Errorf("%w: offset %d", ErrArgument, offset)
	}
	l, err := c.laneFor(ctx, KindRead, ref)
	if err != nil {
		return 0, err
	}
	n, err := l.readRange(ref, p, offset)
	c.done(l, err)
	return n, err
}

// ReadInfo is Read that also describes what it has read. Info.Version is the version to name
// in CompareAndWrite. Info.WriteOnce and Info.Slab are not set; see Stat.
func (c *Client) ReadInfo(ctx context.Context, ref Ref, dst []byte) ([]byte, Info, error) {
	l, err := c.lane(ctx, KindRead)
	if err != nil {
		return dst, Info{}, err
	}
	out, image, chunks, err := l.readObject(ref, dst)
	c.done(l, err)
	return out, infoOf(image, int64(len(out)-len(dst)), chunks), err
}

// Stat describes an object. It reads the index of a large object, not its chunks. The errors
// are those of Read.
func (c *Client) Stat(ctx context.Context, ref Ref) (Info, error) {
	var info Info
	err := c.onLane(ctx, KindRead, func(l *lane) (err error) {
		info, err = l.statObject(ref)
		return err
	})
	return info, err
}

// Replicas returns how many replicas the object's region is configured to have; 0 if the
// Client's table has no such region. It sends nothing.
func (c *Client) Replicas(ref Ref) int {
	r := c.current.Load().view.Load().table.Region(ref.Addr.Region())
	return int(r.GetWantReplicas())
}

// Durability returns the durability of the object's region; 0 if the Client's table has no
// such region. It sends nothing.
func (c *Client) Durability(ref Ref) Durability {
	switch r := c.current.Load().view.Load().table.Region(ref.Addr.Region()); {
	case r == nil:
		return 0
	case durable(r):
		return Durable
	}
	return Volatile
}

// durable reports whether a region's acknowledged changes survive the loss of all power.
func durable(r *quarrypb.Region) bool {
	return r.GetDurability() == quarrypb.Durability_DURABILITY_PMEM
}

// Write replaces the payload of an object. Two rounds with one replica, three with more; more
// for a large object.
//
// Errors: those of Read; ErrImmutable; ErrTooLarge; ErrBusy if another session held the
// object during every attempt; ErrReadOnly; ErrUnknown.
func (c *Client) Write(ctx context.Context, ref Ref, payload []byte) error {
	l, err := c.laneFor(ctx, KindUpdate, ref)
	if err != nil {
		return err
	}
	err = l.writeObject(ref, payload, anyVersion)
	c.done(l, err)
	return err
}

// CompareAndWrite replaces the payload if the object is still at a version; ErrConflict
// otherwise. The errors are else those of Write.
func (c *Client) CompareAndWrite(ctx context.Context, ref Ref, version uint64, payload []byte) error {
	if err := checkVersion(version); err != nil {
		return err
	}
	l, err := c.lane(ctx, KindUpdate)
	if err != nil {
		return err
	}
	err = l.writeObject(ref, payload, version)
	c.done(l, err)
	return err
}

// anyVersion matches every version of an object. Versions of objects start at 1.
const anyVersion = 0

// checkVersion rejects a version that no object can have.
func checkVersion(version uint64) error {
	if version == anyVersion || version > proto.MaxVersion {
		return fmt.Errorf("%w: no object is at version %d", ErrConflict, version)
	}
	return nil
}

// Update replaces the payload by the result of f on the present payload, atomically: no other
// change comes between. f may run more than once; an error of f leaves the object as it was
// and is returned. Other writers of the object wait while f runs. The controller may end a
// session in which f runs for more than 20 leases. The rounds and errors are those of Write.
func (c *Client) Update(ctx context.Context, ref Ref, f func(old []byte) ([]byte, error)) error {
	l, err := c.laneFor(ctx, KindUpdate, ref)
	if err != nil {
		return err
	}
	err = l.updateObject(ref, f)
	c.done(l, err)
	return err
}

// Free ends an object. Two rounds with one replica, three with more. A second Free of the
// same Ref fails with ErrFreed, unless the first ended with ErrUnknown and was not done. The
// errors are those of Write but for ErrImmutable and ErrTooLarge.
func (c *Client) Free(ctx context.Context, ref Ref) error { return c.free(ctx, ref, anyVersion) }

// CompareAndFree ends an object if it is still at a version; ErrConflict otherwise. The
// errors are else those of Free.
func (c *Client) CompareAndFree(ctx context.Context, ref Ref, version uint64) error {
	if err := checkVersion(version); err != nil {
		return err
	}
	return c.free(ctx, ref, version)
}

// free is Free, and CompareAndFree unless version is anyVersion.
func (c *Client) free(ctx context.Context, ref Ref, version uint64) error {
	l, err := c.lane(ctx, KindFree)
	if err != nil {
		return err
	}
	err = l.freeObject(ref, version)
	c.done(l, err)
	return err
}
