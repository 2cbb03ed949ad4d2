package proto

// An encrypted payload, with the payload of n bytes inside:
//
//	0               8            32                    32+n         48+n
//	| envelope word | nonce      | ciphertext          | tag        |
//
// The tag of its image has both TagIndex and TagChunk, which no clear image has; the envelope word
// has the two bits that belong to the payload inside. An index is authenticated and not encrypted: it
// holds addresses and lengths, which are seen anyway, and programs without keys follow it.
// Programs from before encryption take such an image for an index, and refuse it, for its length
// is negative.
const (
	// TagEncrypted are the tag bits of an encrypted payload, all of them together.
	TagEncrypted = TagIndex | TagChunk
	// NonceBytes is the length of a nonce, and AuthBytes that of an authentication tag.
	NonceBytes = 24
	AuthBytes  = 16
	// EncryptedLead precedes the ciphertext, EncryptionBytes is by how much a payload is longer encrypted.
	EncryptedLead   = 8 + NonceBytes
	EncryptionBytes = EncryptedLead + AuthBytes
)

const (
	// KeyIDBits are the bits of a key's id.
	KeyIDBits = 48
	// envelopeMark is the top of an envelope word, with the format. As the length of an index it is negative.
	envelopeMark     = 0x81
	envelopeMarkAt   = 56
	envelopeTagAt    = KeyIDBits
	envelopeTagShift = TagBits - 2 // TagChunk is the lower bit
)

// Envelope is the first word of an encrypted payload: mark:8 | spare:6 | index, chunk:2 | key id:48.
type Envelope uint64

// MakeEnvelope names the key, and has the bits TagIndex and TagChunk of a tag.
func MakeEnvelope(tag uint32, key uint64) Envelope {
	return envelopeMark<<envelopeMarkAt | Envelope(tag>>envelopeTagShift&3)<<envelopeTagAt | Envelope(key&(1<<KeyIDBits-1))
}

// Valid says whether e is an envelope word.
func (e Envelope) Valid() bool {
	return e>>(envelopeTagAt+2) == envelopeMark<<(envelopeMarkAt-envelopeTagAt-2) && e.tag() != TagEncrypted
}

// Key is the id of the key.
func (e Envelope) Key() uint64 { return uint64(e) & (1<<KeyIDBits - 1) }

func (e Envelope) tag() uint32 { return uint32(e>>envelopeTagAt&3) << envelopeTagShift }

// IsEncrypted says whether the tag of an image is that of an encrypted payload.
func IsEncrypted(tag uint32) bool { return tag&TagEncrypted == TagEncrypted }

// InnerTag is the tag of what is inside of an encrypted payload, and its envelope; false if the payload has none.
// Preconditions: IsEncrypted(tag).
func InnerTag(tag uint32, payload []byte) (inner uint32, e Envelope, ok bool) {
	if len(payload) < EncryptionBytes {
		return 0, 0, false
	}
	e = Envelope(Word(payload, 0))
	return tag&^TagEncrypted | e.tag(), e, e.Valid()
}

// Inner is what programs without keys see of a payload: the tag of what is inside, and the index itself if it
// is one. false if the payload should be encrypted and has no envelope.
func Inner(tag uint32, payload []byte) (inner uint32, body []byte, ok bool) {
	if !IsEncrypted(tag) {
		return tag, payload, true
	}
	if inner, _, ok = InnerTag(tag, payload); !ok {
		return 0, nil, false
	}
	return inner, Inside(payload), true
}

// Inside is the ciphertext of an encrypted payload; of an index it is the index.
// Preconditions: InnerTag has accepted the payload.
func Inside(payload []byte) []byte { return payload[EncryptedLead : len(payload)-AuthBytes] }
