package pool

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/quarrystore/quarry/client"
)

// The protocol of pool agents, little endian, over one stream in each direction. Both sides send a greeting first. Then the client sends requests, each with an
// identifier, and the agent answers them in any order. Both sides send a frame of kind frameAlive at least every aliveEvery.
//
//	greeting  magic "QPOOLAGT" | version u32 | requests at a time u32, of the agent
//	frame     bytes of the body u32 | kind u8 | 0 0 0 | identifier u64 | body
//
// Bodies: opCreate to opOwn have a control in JSON; the first four of these are answered by one. The others have words of 8 bytes:
//
//	opPersist, opDeepPersist   offset | bytes
//	opRead                     offset | length          answer: bytes
//	opCompare                  offset | length | count  answer: count times hash, alike
//	opFlush                    offset | length
//	frameFailed                which of sentinels the error is, a bit each | text

// agentVersion is the version of the protocol. Another one is refused by both sides.
const agentVersion = 1

const agentMagic = "QPOOLAGT"

// Limits of the protocol.
const (
	maxData       = client.MaxRawBytes // bytes that one request moves
	maxBody       = maxData + 8
	maxControl    = 16 << 10
	maxErrorText  = 4 << 10
	greetingBytes = 16
	frameBytes    = 16
	// streamLanes is how many requests an agent runs at a time. It has a buffer for each.
	streamLanes = 32
)

// Kinds of frames.
const (
	opCreate byte = iota + 1
	opOpen
	opLook // describe a pool, for opCompare
	opClose
	opRemove
	opSetAttr
	opOwn
	opPersist
	opDeepPersist
	opRead
	opCompare
	opFlush

	frameDone   byte = 128
	frameFailed byte = 129
	frameAlive  byte = 130
)

// changes says that an operation without an answer may have changed something.
func changes(op byte) bool { return op != opLook && op != opRead && op != opCompare }

func isControl(op byte) bool { return op >= opCreate && op <= opOwn }

// errFrame: bytes are not of the protocol.
var errFrame = errors.New("not a frame of the protocol of pool agents")

func greeting(lanes uint32) []byte {
	b := append(make([]byte, 0, greetingBytes), agentMagic...)
	b = binary.LittleEndian.AppendUint32(b, agentVersion)
	return binary.LittleEndian.AppendUint32(b, lanes)
}

// readGreeting reads the greeting of the other side.
func readGreeting(r io.Reader) (version, lanes uint32, err error) {
	b := make([]byte, greetingBytes)
	n, err := io.ReadFull(r, b)
	if n < len(b) && bytes.HasPrefix([]byte(agentMagic), b[:min(n, len(agentMagic))]) {
		return 0, 0, err
	}
	if !bytes.HasPrefix(b, []byte(agentMagic)) {
		return 0, 0, fmt.Errorf("%w: it begins with %q", errFrame, b[:n])
	}
	return binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint32(b[12:]), nil
}

// frame is a request or an answer.
type frame struct {
	kind byte
	id   uint64
	body []byte
}

// appendFrame appends a frame's header, for a body of n bytes.
func appendFrame(b []byte, kind byte, id uint64, n int) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(n))
	b = append(b, kind, 0, 0, 0)
	return binary.LittleEndian.AppendUint64(b, id)
}

// headOf is what a frame's header says, and the length of its body.
func headOf(head []byte) (f frame, n int) {
	f.kind, f.id = head[4], binary.LittleEndian.Uint64(head[8:])
	if head[5]|head[6]|head[7] != 0 {
		f.kind = 0
	}
	return f, int(binary.LittleEndian.Uint32(head))
}

// readFrame reads a frame. The body is in buf, which has room for maxBody.
func readFrame(r io.Reader, buf []byte) (f frame, err error) {
	var head [frameBytes]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return f, err
	}
	f, n := headOf(head[:])
	known := f.kind >= opCreate && f.kind <= opFlush || f.kind >= frameDone && f.kind <= frameAlive
	if !known || n > maxBody || isControl(f.kind) && n > maxControl {
		return f, fmt.Errorf("%w: kind %d with %d bytes", errFrame, f.kind, n)
	}
	f.body = buf[:n]
	if _, err := io.ReadFull(r, f.body); err != nil {
		return f, fmt.Errorf("in a frame: %w", noEOF(err))
	}
	return f, nil
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// control is the body of requests that are not about ranges, and of their answers.
type control struct {
	Name        string `json:"name,omitempty"`
	Bytes       uint64 `json:"bytes,omitempty"`
	Attr        []byte `json:"attr,omitempty"` // as in the object of a pool's name
	Replicas    int    `json:"replicas,omitempty"`
	RegionBytes uint64 `json:"region_bytes,omitempty"`
	Durable     bool   `json:"durable,omitempty"`
	Bare        bool   `json:"bare,omitempty"`  // opOpen: of any size
	Keep        bool   `json:"keep,omitempty"`  // opOpen: opOwn follows before anything is written
	Token       string `json:"token,omitempty"` // of the last owner
	Torn        bool   `json:"torn,omitempty"`  // opCreate, opOwn: as with create and own
	Dirty       bool   `json:"dirty,omitempty"` // opClose: the pool may lack something
	Info        *Info  `json:"info,omitempty"`
}

func (c control) encode() []byte {
	b, err := json.Marshal(c)
	if err != nil {
		panic(err) // plain data
	}
	return b
}

func decodeControl(b []byte) (c control, err error) {
	if len(b) == 0 {
		return c, nil
	}
	if len(b) > maxControl {
		return c, fmt.Errorf("%w: %d bytes", errFrame, len(b))
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		return control{}, fmt.Errorf("%w: %w", errFrame, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return control{}, fmt.Errorf("%w: bytes behind its end", errFrame)
	}
	return c, nil
}

// attr are the attributes of a control.
func (c control) attr() (a Attr, err error) {
	if n, err := binary.Decode(c.Attr, binary.LittleEndian, &a); err != nil || n != len(c.Attr) {
		return Attr{}, fmt.Errorf("%w: attributes of %d bytes", errFrame, len(c.Attr))
	}
	return a, nil
}

func encodeAttr(a Attr) []byte {
	b, err := binary.Append(nil, binary.LittleEndian, a)
	if err != nil {
		panic(err) // of fixed size
	}
	return b
}

// span of a request is what its words say: offset, length, count; the length of opPersist and opDeepPersist is that of their bytes.
func (f frame) span() (off, n, count uint64, data []byte, err error) {
	words := map[byte]int{opPersist: 1, opDeepPersist: 1, opRead: 2, opCompare: 3, opFlush: 2}[f.kind]
	rest := len(f.body) - 8*words
	moves := f.kind == opPersist || f.kind == opDeepPersist
	if words == 0 || rest < 0 || rest > 0 && !moves {
		return 0, 0, 0, nil, fmt.Errorf("%w: a body of %d bytes", errFrame, len(f.body))
	}
	word := [3]uint64{}
	for i := range words {
		word[i] = binary.LittleEndian.Uint64(f.body[8*i:])
	}
	off, n, count = word[0], word[1], word[2]
	switch {
	case moves:
		data = f.body[8:]
		n = uint64(len(data))
	case f.kind == opRead && n > maxData:
		err = fmt.Errorf("%w: %d bytes to read", errFrame, n)
	case f.kind == opCompare && (count > parts || n > maxData || n*count > maxData):
		err = fmt.Errorf("%w: %d parts of %d bytes to compare", errFrame, count, n)
	}
	return off, n, count, data, err
}

// appendWords appends words.
func appendWords(b []byte, words ...uint64) []byte {
	for _, w := range words {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	return b
}

// hashBytes is what opCompare answers for a part.
const hashBytes = 9

func appendHash(b []byte, hash uint64, alike bool) []byte {
	b = binary.LittleEndian.AppendUint64(b, hash)
	if alike {
		return append(b, 1)
	}
	return append(b, 0)
}

// decodeHashes reads the answer of opCompare.
func decodeHashes(b []byte, hashes []uint64, alike []bool) error {
	if len(b) != hashBytes*len(hashes) {
		return fmt.Errorf("%w: %d bytes for %d hashes", errFrame, len(b), len(hashes))
	}
	for i := range hashes {
		p := b[hashBytes*i:]
		hashes[i], alike[i] = binary.LittleEndian.Uint64(p), p[8] == 1
		if p[8] > 1 {
			return fmt.Errorf("%w: part %d is alike by %d", errFrame, i, p[8])
		}
	}
	return nil
}
