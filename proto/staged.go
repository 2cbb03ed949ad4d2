package proto

// Source says where the image of a version of a STAGED slab was found.
type Source uint8

const (
	// FromHome: home is whole, and of the version.
	FromHome Source = iota
	// FromRecord: the record in the slab has turned home into the image.
	FromRecord
	// FromShadow: the image is in the slab that the locator names.
	FromShadow
	// FromNowhere: neither is of the version and whole. The slab is damaged, or the parts of the READ are
	// of different moments.
	FromNowhere
)

// LocatorIn is L of a STAGED slab that has been READ whole into buf.
func (s Slab) LocatorIn(buf []byte) Locator { return Locator(Word(buf, wordsBytes)) }

// RecordIn is the record that the locator in buf leads to, if there is one in the slab and it is whole. buf
// is the whole slab as READ; the patch aliases it.
func (s Slab) RecordIn(buf []byte, seed uint64) (version uint64, patch []byte, ok bool) {
	l := s.LocatorIn(buf)
	off, n := int(l.Off()), l.Bytes()
	if !l.Valid() || l.Kind() != RecordInline || off < StagedLead+ImageHeaderBytes || off+n > len(buf) {
		return 0, nil, false
	}
	return DecodeRecord(buf[off:off+n], seed)
}

// ShadowOff is where the image begins to which the locator leads in a region of so many bytes; false
// unless it leads to a shadow that an image of the slab can have.
func (s Slab) ShadowOff(l Locator, regionBytes uint64) (off uint64, bytes int, ok bool) {
	off, bytes = uint64(l.Off())+StagedLead, l.Bytes()
	ok = l.Valid() && l.Kind() == RecordShadow && bytes >= ImageHeaderBytes && bytes <= s.Class.ImageBytes(Staged) && off+uint64(bytes) <= regionBytes
	return off, bytes, ok
}

// Compose finds the image of a version of a STAGED slab that has been READ whole into buf. FromRecord: home
// in buf has been turned into it. FromShadow, FromNowhere: h and payload are not valid.
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
