package proto

// This file reads STAGED slabs: it finds the image of a version in home, in the record, or tells
// that it is in a shadow. docs/LAYOUT2.md has the protocol.

// Source says where the image of a version of a STAGED slab was found.
type Source uint8

const (
	// FromHome: home is whole, and of the version.
	FromHome Source = iota
	// FromRecord: the record in the slab has turned home into the image.
	FromRecord
	// FromShadow: the image is in the slab that the locator names.
	FromShadow
	// FromNowhere: neither home nor the record is whole and of the version. The slab is damaged,
	// or the READ has taken its parts at different moments.
	FromNowhere
)

// LocatorIn is L of a STAGED slab that has been READ whole into buf.
func (s Slab) LocatorIn(buf []byte) Locator { return Locator(Word(buf, wordsBytes)) }

// RecordIn is the record in the slab that L leads to, if L leads to one and the record is whole.
// buf is the whole slab as READ; the patch aliases it. version is that of the image that the
// record makes of home.
func (s Slab) RecordIn(buf []byte, seed uint64) (version uint64, patch []byte, ok bool) {
	l := s.LocatorIn(buf)
	off, n := int(l.Off()), l.Bytes()
	if !l.Valid() || l.Kind() != RecordInline || off < StagedLead+ImageHeaderBytes || off+n > len(buf) {
		return 0, nil, false
	}
	return DecodeRecord(buf[off:off+n], seed)
}

// RecordAbove is the largest version above v that a whole record in the tail of the slab has, whether the locator leads
// there or not; 0 if there is none. Records end where the slab does, and begin behind home. buf is the whole slab
// as READ.
func (s Slab) RecordAbove(buf []byte, v, seed uint64) (version uint64) {
	begin := StagedLead + ImageHeaderBytes
	if h := ParseImageHeader(buf[StagedLead:]); h.Version == v && StagedLead+ImageLen(h.Length) <= len(buf) {
		begin = StagedLead + ImageLen(h.Length)
	}
	for at := begin; at+RecordHeaderBytes <= len(buf); at += 8 {
		w := Word(buf, at+8)
		if w&MaxVersion <= max(v, version) || RecordLen(int(w>>VersionBits)) != len(buf)-at {
			continue
		}
		if made, _, ok := DecodeRecord(buf[at:], seed); ok {
			version = made
		}
	}
	return version
}

// ShadowOff is the offset and length, in the region, of the image that l leads to. ok is false
// unless l leads to a shadow, within a region of regionBytes, whose length an image of this slab
// can have.
func (s Slab) ShadowOff(l Locator, regionBytes uint64) (off uint64, bytes int, ok bool) {
	off, bytes = uint64(l.Off())+StagedLead, l.Bytes()
	ok = l.Valid() && l.Kind() == RecordShadow && bytes >= ImageHeaderBytes && bytes <= s.Class.ImageBytes(Staged) && off+uint64(bytes) <= regionBytes
	return off, bytes, ok
}

// Compose finds the image of a version of a STAGED slab that has been READ whole into buf.
//
//   - FromHome: home is the image.
//   - FromRecord: it was home with the record applied. buf has been changed: home in it is the image now.
//   - FromShadow: L leads to a shadow, which the caller has to READ. h and payload are not valid.
//   - FromNowhere: the image was not found. h and payload are not valid, and home in buf may have been changed.
func (s Slab) Compose(buf []byte, version, seed uint64) (h ImageHeader, payload []byte, from Source) {
	home := buf[StagedLead:]
	if ParseImageHeader(home).Version == version {
		var ok bool
		if h, payload, ok = DecodeImage(home, seed); ok {
			return h, payload, FromHome
		}
	}
	l := s.LocatorIn(buf)
	if l.Valid() && l.Kind() == RecordShadow {
		return h, nil, FromShadow
	}
	made, patch, ok := s.RecordIn(buf, seed)
	if !ok || made != version {
		return h, nil, FromNowhere
	}
	home = buf[StagedLead:l.Off()]
	if !ApplyPatch(home, patch) {
		return h, nil, FromNowhere
	}
	if h, payload, ok = DecodeImage(home, seed); !ok || h.Version != version {
		return h, nil, FromNowhere
	}
	return h, payload, FromRecord
}
