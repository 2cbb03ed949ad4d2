package fsck

import (
	"bytes"
	"fmt"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/slab"
)

// maxOdd bounds the slabs that are looked at again; where more are wrong than
// that, no client is to blame.
const maxOdd = 1 << 16

// oddSlab is a slab that seemed wrong.
type oddSlab struct {
	block uint32       // of the region
	index int          // in its block
	h     proto.Header // of its block
	v     proto.V      // of the primary, when looked at first
}

// block checks one block: one round for its header, map and all replicas of its bytes, and another one for what
// differs where hashes were asked for.
func (c *check) block(w *work, b uint32, odd []oddSlab) ([]oddSlab, error) {
	if err := c.readBlock(w, b); err != nil {
		return odd, err
	}
	h := proto.Header(proto.Word(c.words, 0))
	if !h.Valid() || !h.State().Open() {
		return odd, nil // not open (any more): its slabs hold nothing valid
	}
	size := h.Class().Bytes()
	for i := range h.Class().Slabs() {
		w.stat.Slabs++
		s := look{h: h, slab: w.g.Slab(b, i, h), taken: taken(c.maps, i), opens: w.opens(h)}
		for r := range w.Replicas {
			s.bytes[r] = c.blocks[r][i*size : (i+1)*size]
		}
		switch v := c.judge(w, &s); {
		case v.what == "":
			c.count(w, &s)
		case len(odd) < maxOdd:
			_, pv := s.words(0)
			odd = append(odd, oddSlab{b, i, h, pv})
		default:
			c.conclude(w, &s, v)
		}
	}
	for i := range proto.MapBytes / 8 {
		if proto.Word(c.maps, 8*i)&^h.Class().MapMask(i) != 0 {
			f := c.finding(w, 0, KindMap, fmt.Sprintf("block %d", b), "word %d of the map has bits beyond its %d slabs", i, h.Class().Slabs())
			f.block, f.inBlock = b, true
			c.report.add(f)
			break
		}
	}
	return odd, nil
}

// again looks at a slab that seemed wrong. over: no further look is needed.
func (c *check) again(w *work, x *oddSlab, attempt int) (over bool, err error) {
	s := look{h: x.h, slab: w.g.Slab(x.block, x.index, x.h), opens: w.opens(x.h)}
	c.round.Reset()
	for r, t := range w.Replicas {
		s.bytes[r] = c.blocks[r][:x.h.Class().Bytes()]
		ch := c.round.Chain(t)
		if r == 0 {
			ch.Read(w.g.HeaderOff(x.block), c.words[:8])
			ch.Read(w.g.MapOff(x.block)+uint64(x.index/64*8), c.words[8:16])
		}
		ch.Read(s.slab.Off, s.bytes[r])
	}
	if err := c.do(w); err != nil {
		return false, err
	}
	if proto.Header(proto.Word(c.words, 0)) != x.h {
		return true, nil // the block has moved on
	}
	s.taken = proto.Word(c.words, 8)>>(x.index%64)&1 == 1
	if r, _ := s.words(0); r != 0 {
		for i, t := range w.Replicas {
			if err := c.readShadow(w, t, s.slab, s.h.Generation(), s.bytes[i]); err != nil {
				return false, err
			}
		}
	}
	v := c.judge(w, &s)
	if v.what == "" {
		c.count(w, &s)
		return true, nil
	}
	if attempt < looks {
		return false, nil
	}
	if _, now := s.words(0); now != x.v {
		w.stat.Busy++
		return true, nil
	}
	c.conclude(w, &s, v)
	return true, nil
}

// conclude counts or reports a slab that stays wrong.
func (c *check) conclude(w *work, s *look, v verdict) {
	if v.pending {
		w.stat.Pending++
		return
	}
	addr := proto.MakeAddr(w.ID, uint32(s.slab.Off))
	f := c.finding(w, v.node, v.kind, addr.String(), "%s", v.what)
	f.addr, f.ref = addr, c.refOf(w, s)
	if v.kind == KindBad {
		f.Mark = s.mark(w)
	}
	f.block, f.inBlock = w.g.BlockOf(s.slab.Off)
	c.report.add(f)
	if v.beside != nil {
		c.conclude(w, s, *v.beside)
	}
}

// refOf is the reference of the object in a slab, from any replica that has the
// image that V of the primary names; zero if there is none.
func (c *check) refOf(w *work, s *look) proto.Ref {
	_, v := s.words(0)
	if !v.Valid() || v.State() != proto.StateLive {
		return proto.Ref{}
	}
	gen := s.h.Generation()
	for i := range w.Replicas {
		if h, _, ok := proto.DecodeImage(s.slab.Image(s.bytes[i], v.Version()), proto.Seed(w.seed, s.slab.Off, gen)); ok && h.Version == v.Version() {
			return proto.Ref{Addr: proto.MakeAddr(w.ID, uint32(s.slab.Off)), Incarnation: proto.MakeIncarnation(gen, h.Born)}
		}
	}
	return proto.Ref{}
}

// look is one slab as READ on all replicas.
type look struct {
	h     proto.Header // of its block
	slab  proto.Slab
	taken bool                   // its map bit at the primary
	opens bool                   // its V may be open
	bytes [slab.MaxListed][]byte // by replica
}

// opens says whether V of the slabs of a block may be open.
func (w *work) opens(h proto.Header) bool { return w.OpenWords && h.Kind() != proto.Staged }

// mark is the reference of the mark of a slab that is BAD at the primary.
func (s *look) mark(w *work) proto.Ref {
	_, v := s.words(0)
	return proto.Ref{Addr: proto.MakeAddr(w.ID, uint32(s.slab.Off)), Incarnation: proto.MakeIncarnation(s.h.Generation(), v.Version())}
}

// words are R and V, settled, of the slab at a replica.
func (s *look) words(replica int) (proto.R, proto.V) {
	r, v := s.slab.Words(s.bytes[replica])
	if s.opens {
		v = v.Settled()
	}
	return r, v
}

// open says whether V of the slab is open at the primary.
func (s *look) open() bool {
	_, v := s.slab.Words(s.bytes[0])
	return s.opens && v.IsOpen()
}

// verdict on a slab; what is "" if all is right.
type verdict struct {
	kind    Kind
	what    string   // for people
	node    int      // index of the replica; below 0: the region
	pending bool     // no fault while a client that is alive may be about to mend it
	beside  *verdict // another fault of the same slab
}

// taken is the bit of slab i in a map.
func taken(m []byte, i int) bool { return proto.Word(m, i/64*8)>>(i%64)&1 == 1 }

// judge says what is wrong with a slab.
func (c *check) judge(w *work, s *look) verdict {
	r, v := s.words(0)
	if !v.Valid() || !r.Valid() {
		return verdict{kind: KindWord, what: fmt.Sprintf("V %#016x, R %#016x", uint64(v), uint64(r))}
	}
	if r != 0 && c.o.Session(r.Session()) == slab.SessionGone {
		return verdict{kind: KindReservation, what: fmt.Sprintf("reserved by %v, whose session does not exist", r)}
	}
	switch {
	case r == 0 && s.open():
		return verdict{kind: KindWord, what: fmt.Sprintf("%v is open, and unreserved", v)}
	case v.State() == proto.StateBad:
		bad := verdict{kind: KindBad, what: fmt.Sprintf("no replica had a whole image: the object is lost; restore it, or give it up, by its mark %v", s.mark(w))}
		if other := c.judgeBackups(w, s, v, nil, r != 0); other.what != "" {
			bad.beside = &other // the mark is not taken away before they are alike
		}
		return bad
	case v.State() == proto.StateFree && r == 0 && s.taken:
		if other := c.judgeBackups(w, s, v, nil, false); other.what != "" {
			return other // no Free leaves it so: one of them is damaged
		}
		return verdict{kind: KindLeak, what: fmt.Sprintf("taken in the map, %v and unreserved", v), pending: c.o.Writers()}
	case !s.taken && (v.State() == proto.StateLive || r != 0 && !s.staging(w)):
		return verdict{kind: KindMap, what: fmt.Sprintf("%v, %v, and free in the map", v, r)}
	}
	var image []byte
	if v.State() == proto.StateLive {
		var bad verdict
		if s.slab.Kind == proto.Staged {
			if bad = judgeStaged(w, s, r, v); bad.what != "" {
				return bad
			}
		}
		if image, bad = c.image(w, s, v, s.bytes[0], 0); bad.what != "" {
			return bad
		}
	}
	return c.judgeBackups(w, s, v, image, r != 0)
}

// judgeBackups compares V and the image of a slab, nil if it has none, with those of its backups. atWork: the holder of R may
// be in the middle of a commit, or is dead and will be rolled back.
func (c *check) judgeBackups(w *work, s *look, v proto.V, image []byte, atWork bool) verdict {
	for i := 1; i < len(w.Replicas); i++ {
		_, bv := s.words(i)
		if bv != v {
			if atWork {
				continue
			}
			return verdict{kind: KindReplica, node: i, what: fmt.Sprintf("V is %v, the primary has %v", bv, v)}
		}
		if image == nil {
			continue
		}
		other := s.slab.Image(s.bytes[i], v.Version())[:len(image)]
		if !bytes.Equal(other, image) {
			if _, bad := c.image(w, s, v, s.bytes[i], i); bad.what != "" {
				return bad
			}
			return verdict{kind: KindReplica, node: i, what: fmt.Sprintf("the image of %v differs from the primary's", v)}
		}
	}
	return verdict{}
}

// image checks the active image of a LIVE slab and returns its bytes.
func (c *check) image(w *work, s *look, v proto.V, slab []byte, node int) ([]byte, verdict) {
	img := s.slab.Image(slab, v.Version())
	h, payload, ok := proto.DecodeImage(img, proto.Seed(w.seed, s.slab.Off, s.h.Generation()))
	switch {
	case !ok:
		return nil, verdict{kind: KindImage, node: node, what: fmt.Sprintf("the checksum of the image of %v is wrong", v)}
	case h.Version != v.Version():
		return nil, verdict{kind: KindImage, node: node, what: fmt.Sprintf("V is %v, its image has version %d", v, h.Version)}
	case !hasEnvelope(h, payload):
		return nil, verdict{kind: KindImage, node: node, what: fmt.Sprintf("the image of %v should be encrypted, and has no envelope", v)}
	case h.Born == 0 || h.Born > h.Version:
		return nil, verdict{kind: KindImage, node: node, what: fmt.Sprintf("born %d, version %d", h.Born, h.Version)}
	}
	return img[:proto.ImageLen(len(payload))], verdict{}
}

// hasEnvelope says whether an encrypted payload has an envelope of a known format.
func hasEnvelope(h proto.ImageHeader, payload []byte) bool {
	_, _, ok := proto.Inner(h.Tag, payload)
	return ok
}

// count adds a slab that is right to the region's figures.
func (c *check) count(w *work, s *look) {
	r, v := s.words(0)
	if r != 0 && !mayCome(c.o.Session(r.Session())) {
		w.stat.HeldByDead++
	}
	if v.State() != proto.StateLive {
		if r != 0 {
			w.stat.Claimed++
		}
		return
	}
	w.stat.Live++
	if r != 0 {
		w.stat.Held++
	}
	h, payload, ok := proto.DecodeImage(s.slab.Image(s.bytes[0], v.Version()), proto.Seed(w.seed, s.slab.Off, s.h.Generation()))
	if !ok {
		return
	}
	seen := Object{Kind: s.slab.Kind, Encrypted: proto.IsEncrypted(h.Tag)}
	if seen.Encrypted {
		w.stat.Encrypted++
		_, e, _ := proto.InnerTag(h.Tag, payload)
		seen.Key = e.Key()
	}
	if h.Tag, payload, ok = proto.Inner(h.Tag, payload); !ok {
		return
	}
	ref := proto.Ref{Addr: proto.MakeAddr(w.ID, uint32(s.slab.Off)), Incarnation: proto.MakeIncarnation(s.h.Generation(), h.Born)}
	if c.o.Object != nil && h.Tag&proto.TagChunk == 0 {
		seen.Ref, seen.Tag, seen.Bytes, seen.Version, seen.Writer = ref, h.Tag&proto.MaxUserTag, len(payload), h.Version, h.Writer.Session()
		c.o.Object(seen)
	}
	switch {
	case h.Tag&proto.TagIndex != 0:
		w.stat.Objects++
		c.indexes = append(c.indexes, indexed{w, ref, h.Version, chunkRefs(payload)})
	case h.Tag&proto.TagChunk != 0:
		w.stat.PayloadBytes += int64(len(payload))
		c.live[ref] = &chunk{version: h.Version, writer: h.Writer.Session()}
	default:
		w.stat.Objects++
		w.stat.PayloadBytes += int64(len(payload))
	}
}
