package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/slab"
	"github.com/quarrystore/quarry/proto"
)

// Ref names an object for ever; see proto.Ref.
type Ref = proto.Ref

// MaxReplicas of an object: the most that controllers give a region.
const MaxReplicas = 3

// AllocOptions of one object. The zero value is a small mutable object.
type AllocOptions struct {
	// WriteOnce objects cannot be updated; they take half the memory.
	WriteOnce bool
	// Tag says what the object is for: 18 bits, the caller's own.
	Tag uint32
	// Capacity is the room for later payloads, in bytes; 0 means what the size
	// class of the first payload happens to give.
	Capacity int
	// Replicas of the region; 0 means Config.Replicas.
	Replicas int
}

// Info describes an object as it was at one moment.
type Info struct {
	Version   uint64 `json:"version"` // rises with every change
	Born      uint64 `json:"born"`
	Tag       uint32 `json:"tag"`
	Bytes     int64  `json:"bytes"`
	Chunks    int    `json:"chunks"` // slabs beside the first; 0 for an object of one slab
	WriteOnce bool   `json:"write_once"`
}

// Alloc makes an object with a first payload of 0 B to MaxObjectBytes.
func (c *Client) Alloc(ctx context.Context, payload []byte, o AllocOptions) (Ref, error) {
	if o.Replicas == 0 {
		o.Replicas = c.cfg.Replicas
	}
	if o.Tag > proto.MaxUserTag {
		return Ref{}, fmt.Errorf("%w: tag %d: want at most %d", ErrArgument, o.Tag, proto.MaxUserTag)
	}
	if o.Replicas < 1 || o.Replicas > MaxReplicas {
		return Ref{}, fmt.Errorf("%w: %d replicas: want 1 to %d", ErrArgument, o.Replicas, MaxReplicas)
	}
	if n := max(len(payload), o.Capacity); n > MaxObjectBytes {
		return Ref{}, fmt.Errorf("%w: %d bytes, an object holds at most %d", ErrTooLarge, n, MaxObjectBytes)
	}
	l, err := c.lane(ctx, KindAlloc)
	if err != nil {
		return Ref{}, err
	}
	ref, err := l.allocObject(payload, o)
	c.done(l, err)
	return ref, err
}

func (l *lane) allocObject(payload []byte, o AllocOptions) (Ref, error) {
	w := alloc.Want{Kind: proto.Pair, Capacity: o.Capacity, Replicas: o.Replicas, Tag: o.Tag}
	if o.WriteOnce {
		w.Kind = proto.Single
	}
	if max(len(payload), o.Capacity) > proto.MaxPayloadBytes(w.Kind) {
		return l.allocLarge(payload, w)
	}
	return l.alloc.Alloc(payload, w)
}

// Read returns the object's payload, appended to dst. One round; large objects two.
func (c *Client) Read(ctx context.Context, ref Ref, dst []byte) ([]byte, error) {
	l, err := c.laneFor(ctx, KindRead, ref)
	if err != nil {
		return dst, err
	}
	out, info, err := l.slab.Read(ref, dst)
	if err == nil && info.Tag&proto.TagIndex != 0 {
		out, err = l.readLarge(ref, dst, out[len(dst):])
	}
	c.done(l, err)
	return out, err
}

// View calls fn with the object's payload, which dies with the call: Read without the
// copy. fn must not use the Client, and its error comes back as it is.
func (c *Client) View(ctx context.Context, ref Ref, fn func(payload []byte) error) error {
	l, err := c.laneFor(ctx, KindRead, ref)
	if err != nil {
		return err
	}
	b, info, err := l.slab.View(ref)
	if err == nil && info.Tag&proto.TagIndex != 0 {
		b, err = l.readLarge(ref, nil, append([]byte(nil), b...))
	}
	if err != nil {
		c.done(l, err)
		return err
	}
	err = fn(b)
	c.done(l, nil)
	return err
}

// ReadInfo is Read that also describes what it read: the version to name in
// CompareAndWrite.
func (c *Client) ReadInfo(ctx context.Context, ref Ref, dst []byte) ([]byte, Info, error) {
	var out []byte
	var info Info
	err := c.on(ctx, KindRead, func(l *lane) (err error) {
		for range maxIndexReads {
			var i slab.Info
			if out, i, err = l.slab.Read(ref, dst); err != nil {
				return err
			}
			info = Info{Version: i.Version, Born: i.Born, Tag: i.Tag & proto.MaxUserTag, Bytes: int64(len(out) - len(dst))}
			if i.Tag&proto.TagIndex == 0 {
				return nil
			}
			x, xerr := parseIndex(out[len(dst):])
			if xerr != nil {
				return xerr
			}
			info.Bytes, info.Chunks = x.bytes, len(x.chunks)
			if out, err = l.readChunks(x, dst); err != errMoved {
				return err
			}
		}
		return fmt.Errorf("%w: %v kept changing", ErrBusy, ref)
	})
	return out, info, err
}

// Stat describes an object without reading what a large one consists of.
func (c *Client) Stat(ctx context.Context, ref Ref) (Info, error) {
	var info Info
	err := c.on(ctx, KindRead, func(l *lane) error {
		out, i, err := l.slab.Read(ref, nil)
		if err != nil {
			return err
		}
		info = Info{Version: i.Version, Born: i.Born, Tag: i.Tag & proto.MaxUserTag, Bytes: int64(len(out))}
		if i.Tag&proto.TagIndex != 0 {
			x, err := parseIndex(out)
			if err != nil {
				return err
			}
			info.Bytes, info.Chunks = x.bytes, len(x.chunks)
		}
		info.WriteOnce = l.isWriteOnce(ref)
		return nil
	})
	return info, err
}

// isWriteOnce tells an object's kind from the block header that its READ has cached.
func (l *lane) isWriteOnce(ref Ref) bool {
	reg, err := l.Region(ref.Addr.Region())
	if err != nil {
		return false
	}
	b, ok := reg.Geometry.BlockOf(uint64(ref.Addr.Off()))
	return ok && reg.Headers.Load(b).Kind() == proto.Single
}

// Replicas is how many replicas the region of an object is to have; 0 if the table
// does not have the region.
func (c *Client) Replicas(ref Ref) int {
	r := c.current.Load().now.Load().table.Region(ref.Addr.Region())
	return int(r.GetWantReplicas())
}

// Write replaces the payload, whatever it was.
func (c *Client) Write(ctx context.Context, ref Ref, payload []byte) error {
	l, err := c.laneFor(ctx, KindUpdate, ref)
	if err != nil {
		return err
	}
	err = l.write(ref, payload, anyVersion)
	c.done(l, err)
	return err
}

// CompareAndWrite replaces the payload if the object is still at a version:
// ErrConflict otherwise.
func (c *Client) CompareAndWrite(ctx context.Context, ref Ref, version uint64, payload []byte) error {
	if version == anyVersion || version > proto.MaxVersion {
		return fmt.Errorf("%w: version %d is none", ErrConflict, version)
	}
	l, err := c.lane(ctx, KindUpdate)
	if err != nil {
		return err
	}
	err = l.write(ref, payload, version)
	c.done(l, err)
	return err
}

// anyVersion is no version of an object: they start at 1.
const anyVersion = 0

// Update replaces the payload by what f makes of it; f may run more than once. An
// error from f leaves the object as it was and is returned.
func (c *Client) Update(ctx context.Context, ref Ref, f func(old []byte) ([]byte, error)) error {
	l, err := c.laneFor(ctx, KindUpdate, ref)
	if err != nil {
		return err
	}
	large := false
	_, err = l.slab.Update(ref, func(old []byte, info *slab.Info) ([]byte, error) {
		if large = info.Tag&proto.TagIndex != 0; large {
			return nil, errIsLarge
		}
		return f(old)
	})
	if large {
		err = l.updateLarge(ref, f)
	}
	c.done(l, err)
	return err
}

// write is Write and CompareAndWrite.
func (l *lane) write(ref Ref, payload []byte, version uint64) error {
	if len(payload) > proto.MaxPayloadBytes(proto.Pair) {
		return l.writeLarge(ref, payload, version)
	}
	large := false
	_, err := l.slab.Update(ref, func(old []byte, info *slab.Info) ([]byte, error) {
		if version != anyVersion && info.Version != version {
			return nil, fmt.Errorf("%w: %d, not %d", ErrConflict, info.Version, version)
		}
		if large = info.Tag&proto.TagIndex != 0; large {
			return nil, errIsLarge
		}
		return payload, nil
	})
	if large {
		return l.writeLarge(ref, payload, version)
	}
	return err
}

// Free ends the object. A second Free of the same Ref fails with ErrFreed.
func (c *Client) Free(ctx context.Context, ref Ref) error {
	l, err := c.lane(ctx, KindFree)
	if err != nil {
		return err
	}
	last, info, err := l.alloc.Free(ref)
	if err == nil && info.Tag&proto.TagIndex != 0 {
		l.freeChunks(bytes.Clone(last))
	}
	if err == nil {
		// The object is freed; a failure to tidy map bits is the scrub's.
		_ = l.alloc.Tidy()
	}
	c.done(l, err)
	return err
}

// ReadMany reads objects and calls fn once for each, in any order. The payload is
// good during the call of fn. One round for up to 128 small objects a node.
func (c *Client) ReadMany(ctx context.Context, refs []Ref, fn func(i int, payload []byte, err error)) error {
	l, err := c.lane(ctx, KindReadMany)
	if err != nil {
		return err
	}
	var large []int
	err = l.slab.ReadMany(refs, func(i int, payload []byte, info slab.Info, err error) {
		if err == nil && info.Tag&proto.TagIndex != 0 {
			large = append(large, i)
			return
		}
		fn(i, payload, err)
	})
	for _, i := range large {
		var out []byte
		rerr := err
		if rerr == nil {
			out, _, rerr = l.slab.Read(refs[i], nil)
		}
		if rerr == nil {
			out, rerr = l.readLarge(refs[i], nil, out)
		}
		fn(i, out, rerr)
	}
	c.done(l, err)
	return err
}

// WriteMany replaces the payloads of objects, each by itself: errs[i] is the
// answer for refs[i]. Two rounds for up to 64 small objects a node, three with backups.
func (c *Client) WriteMany(ctx context.Context, refs []Ref, payloads [][]byte) []error {
	errs := make([]error, len(refs))
	fail := func(err error) []error {
		for i := range errs {
			errs[i] = err
		}
		return errs
	}
	if len(payloads) != len(refs) {
		return fail(fmt.Errorf("%d refs and %d payloads", len(refs), len(payloads)))
	}
	l, err := c.lane(ctx, KindWriteMany)
	if err != nil {
		return fail(err)
	}
	l.slab.WriteMany(refs, payloads, errs)
	for i, e := range errs {
		// Objects of several slabs are written by themselves.
		if errors.Is(e, slab.ErrIndex) || errors.Is(e, ErrTooLarge) {
			errs[i] = l.write(refs[i], payloads[i], anyVersion)
		}
	}
	c.done(l, nil)
	return errs
}
