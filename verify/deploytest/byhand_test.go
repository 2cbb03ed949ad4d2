package deploytest

import (
	"bytes"
	"crypto/ed25519"
	bin "encoding/binary"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/zeebo/xxh3"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// byHand is a client written from docs/PROTOCOL.md: JSON, a socket, and the page's
// numbers. It uses nothing of the packages that other clients are made of.
type byHand struct {
	*testing.T
	url     string
	session uint32
	serial  string
	proof   []byte
	table   struct {
		Regions []struct {
			ID    int    `json:"id"`
			UUID  []byte `json:"uuid"`
			Size  string `json:"sizeBytes"`
			Epoch string `json:"epoch"`
			State string `json:"state"`
		}
		Nodes []struct {
			Endpoints []struct{ Provider, Address string }
		}
	}
	conn     net.Conn
	seq      uint32
	key      uint64
	sequence uint64
}

func (h *byHand) rpc(method string, ask, answer any) {
	b, err := json.Marshal(ask)
	require.NoError(h, err)
	res, err := http.Post(h.url+"/quarry.v1.Controller/"+method, "application/json", bytes.NewReader(b))
	require.NoError(h, err)
	defer res.Body.Close()
	require.Equal(h, http.StatusOK, res.StatusCode, method)
	require.NoError(h, json.NewDecoder(res.Body).Decode(answer))
}

func (h *byHand) read(n int) []byte {
	b := make([]byte, n)
	_, err := io.ReadFull(h.conn, b)
	require.NoError(h, err)
	return b
}

// open opens a session, a connection and a window on the first region.
func (h *byHand) open() {
	var s struct {
		Ticket struct {
			Cluster, Holder, Signature []byte
			Session, Rights            uint32
			Serial, KeyID              string
		}
		Proof []byte
		Table json.RawMessage
	}
	public, private, err := ed25519.GenerateKey(nil)
	require.NoError(h, err)
	h.rpc("OpenSession", map[string]any{"name": "by hand", "key": []byte(public)}, &s)
	h.proof = s.Proof
	require.NoError(h, json.Unmarshal(s.Table, &h.table))
	h.session, h.serial = s.Ticket.Session, s.Ticket.Serial
	serial, err := strconv.ParseUint(h.serial, 10, 64)
	require.NoError(h, err)
	for _, e := range h.table.Nodes[0].Endpoints {
		if e.Provider == "PROVIDER_TCP" {
			h.conn, err = net.Dial("tcp", e.Address)
			require.NoError(h, err)
		}
	}
	h.Cleanup(func() { h.conn.Close() })
	keyID, err := strconv.ParseUint(s.Ticket.KeyID, 10, 64)
	require.NoError(h, err)
	challenge := h.read(56)
	le := bin.LittleEndian
	require.Equal(h, "QUARRYV\n", string(challenge[:8]))
	require.EqualValues(h, 4, le.Uint32(challenge[8:]), "version")
	require.EqualValues(h, 1, le.Uint32(challenge[12:]), "node")
	hello := le.AppendUint32([]byte("QUARRYV\n"), 4)
	hello = le.AppendUint64(le.AppendUint32(hello, 0), uint64(time.Now().UnixNano()))
	hello = append(le.AppendUint64(hello, keyID), s.Ticket.Cluster...)
	hello = le.AppendUint64(le.AppendUint32(le.AppendUint32(hello, h.session), 0), serial)
	hello = le.AppendUint64(le.AppendUint32(le.AppendUint32(hello, s.Ticket.Rights), 0), 0)
	hello = append(append(hello, s.Ticket.Holder...), s.Ticket.Signature...)
	signed := append(append([]byte("quarry hello 3\x00"), challenge...), hello...)
	hello = append(hello, ed25519.Sign(private, append(signed, make([]byte, 32)...))...)
	_, err = h.conn.Write(hello)
	require.NoError(h, err)
	welcome := h.read(32)
	require.Equal(h, "QUARRYV\n", string(welcome[:8]))
	require.Zero(h, le.Uint32(welcome[12:]), "code")
	require.EqualValues(h, 1, le.Uint32(welcome[16:]), "node")

	epoch, err := strconv.ParseUint(h.table.Regions[0].Epoch, 10, 64)
	require.NoError(h, err)
	frame := make([]byte, 48)
	frame[0] = 2
	le.PutUint32(frame[24+4:], uint32(h.table.Regions[0].ID))
	le.PutUint64(frame[24+16:], epoch)
	_, err = h.conn.Write(frame)
	require.NoError(h, err)
	answer := h.read(16 + 32)
	require.EqualValues(h, 2, answer[0])
	require.Zero(h, le.Uint32(answer[16+4:]), "code")
	h.key = le.Uint64(answer[16+16:])
}

// verb of a chain.
type verb struct {
	op, flags        byte
	off, expect, new uint64
	data             []byte // of a WRITE
	bytes            int    // of a READ
}

const (
	opREAD, opWRITE, opCAS = 1, 2, 3
	fenced                 = 1
)

// chain runs verbs and returns their results.
func (h *byHand) chain(verbs ...verb) (results [][]byte) {
	le := bin.LittleEndian
	var head, list, payload []byte
	for _, v := range verbs {
		n := v.bytes + len(v.data)
		list = le.AppendUint32(append(list, v.op, v.flags, 0, 0), uint32(n))
		list = le.AppendUint64(le.AppendUint64(le.AppendUint64(list, v.off), v.expect), v.new)
		payload = append(payload, v.data...)
	}
	h.seq++
	head = le.AppendUint16([]byte{1, 0}, uint16(len(verbs)))
	head = le.AppendUint32(le.AppendUint32(le.AppendUint32(head, h.seq), uint32(len(payload))), 0)
	head = le.AppendUint64(head, h.key)
	_, err := h.conn.Write(append(append(head, list...), payload...))
	require.NoError(h, err)
	var all []byte
	for last := false; !last; {
		a := h.read(16)
		require.Equal(h, []byte{1, 0}, a[:2], "kind and code")
		require.Equal(h, h.seq, le.Uint32(a[4:]))
		all = append(all, h.read(int(le.Uint32(a[8:])))...)
		last = le.Uint32(a[12:]) == 1
	}
	for _, v := range verbs {
		n := map[byte]int{opREAD: v.bytes, opCAS: 8}[v.op]
		results = append(results, all[:n:n])
		all = all[n:]
	}
	require.Empty(h, all)
	return results
}

func (h *byHand) cas(flags byte, off, expect, new uint64) verb {
	return verb{op: opCAS, flags: flags, off: off, expect: expect, new: new}
}

func (h *byHand) reservation() uint64 {
	h.sequence++
	return uint64(h.session)<<46 | h.sequence
}

const (
	version44       = 1<<44 - 1
	free, live      = 0, 1 << 44
	slabBytes       = 128 // class 4, PAIR
	rOff, vOff      = slabBytes/2 - 8, slabBytes / 2
	activePair1     = 2<<61 | 4<<52 // ACTIVE, PAIR, class 4, generation 0
	formattingPair1 = 1<<61 | 4<<52
)

func imageOff(version uint64) uint64 {
	if version&1 == 0 {
		return 0
	}
	return slabBytes/2 + 8
}

func (h *byHand) seed(off uint64, generation uint64) uint64 {
	x := off<<20 | generation
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return xxh3.Hash(h.table.Regions[0].UUID) ^ x ^ x>>31
}

func (h *byHand) image(off uint64, payload string, version, born, r uint64) []byte {
	b := make([]byte, 32+(len(payload)+7)/8*8)
	bin.LittleEndian.PutUint64(b[8:], uint64(len(payload))<<44|version)
	bin.LittleEndian.PutUint64(b[16:], born)
	bin.LittleEndian.PutUint64(b[24:], r)
	copy(b[32:], payload)
	bin.LittleEndian.PutUint64(b, xxh3.HashSeed(b[8:32+len(payload)], h.seed(off, 0)))
	return b
}

// look is Read: payload and version of the object that was born at a version; false
// if it is freed.
func (h *byHand) look(off, born uint64) (payload string, version uint64, ok bool) {
	return h.judge(off, born, h.chain(verb{op: opREAD, off: off, bytes: slabBytes})[0])
}

func (h *byHand) judge(off, born uint64, slab []byte) (payload string, version uint64, ok bool) {
	le := bin.LittleEndian
	v := le.Uint64(slab[vOff:])
	version = v & version44
	img := slab[imageOff(version):]
	if v>>44 != 1 || le.Uint64(img[16:])&version44 != born {
		return "", version, false
	}
	length := le.Uint64(img[8:]) >> 44
	require.Equal(h, version, le.Uint64(img[8:])&version44)
	require.Equal(h, xxh3.HashSeed(img[8:32+length], h.seed(off, 0)), le.Uint64(img), "checksum")
	return string(img[32 : 32+length]), version, true
}

// A whole object's life with numbers from the page alone; the project's client sees
// the same, and the checker finds nothing to complain of.
func TestAnotherClientFromThePage(t *testing.T) {
	cluster := testcluster.New(t, testcluster.Options{Nodes: 1})
	c := cluster.Connect(client.Config{Transport: client.TransportTCP})
	_, err := c.Alloc(t.Context(), make([]byte, 1000), client.AllocOptions{}) // so that there is a region
	require.NoError(t, err)
	h := &byHand{T: t, url: cluster.Controller.URL()}
	h.open()
	size, err := strconv.ParseUint(h.table.Regions[0].Size, 10, 64)
	require.NoError(t, err)
	require.EqualValues(t, 16<<20, size)
	le := bin.LittleEndian

	// Format a block that is free.
	const blocks, data = 15, 1 << 20
	block, header := blocks, uint64(0)
	for taken := uint64(1); taken != 0; {
		block--
		require.GreaterOrEqual(t, block, 0)
		header = uint64(4096 + 8*block)
		taken = le.Uint64(h.chain(verb{op: opREAD, off: header, bytes: 8})[0])
	}
	require.Zero(t, le.Uint64(h.chain(h.cas(0, header, 0, formattingPair1|uint64(h.session)<<14))[0]), "FREE")
	require.NotZero(t, le.Uint64(h.chain(h.cas(0, header, formattingPair1|uint64(h.session)<<14, activePair1))[0]))

	// Claim slab 5: the map bit and the header, then R and V.
	const slab = 5
	off, word := uint64(data+block<<20+slab*slabBytes), uint64(6144+2048*block)
	got := h.chain(h.cas(0, word, 0, 1<<slab), verb{op: opREAD, flags: fenced, off: header, bytes: 8})
	require.Zero(t, le.Uint64(got[0]))
	require.EqualValues(t, activePair1, le.Uint64(got[1]))
	r := h.reservation()
	got = h.chain(h.cas(0, off+rOff, 0, r), verb{op: opREAD, flags: fenced, off: off + vOff, bytes: 8}, verb{op: opREAD, off: word, bytes: 8})
	require.Zero(t, le.Uint64(got[0]))
	require.EqualValues(t, free, le.Uint64(got[1])>>44<<44)
	v := le.Uint64(got[1]) & version44
	require.EqualValues(t, 1<<slab, le.Uint64(got[2]))

	// Birth: image, V, R in one chain, for there is one replica.
	born := v + 1
	got = h.chain(verb{op: opWRITE, off: off + imageOff(born), data: h.image(off, "hello", born, born, r)},
		h.cas(0, off+vOff, free|v, live|born), h.cas(fenced, off+rOff, r, 0))
	require.Equal(t, v, le.Uint64(got[1]))
	require.Equal(t, r, le.Uint64(got[2]))
	ref := proto.Ref{Addr: proto.MakeAddr(uint32(h.table.Regions[0].ID), uint32(off)), Incarnation: proto.MakeIncarnation(0, born)}
	b, err := c.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	require.Equal(t, "hello", string(b))

	// The other client changes it; this one reads, and changes it back.
	require.NoError(t, c.Write(t.Context(), ref, []byte("world")))
	payload, v, ok := h.look(off, born)
	require.True(t, ok)
	require.Equal(t, "world", payload)
	require.Equal(t, born+1, v)
	r = h.reservation()
	got = h.chain(h.cas(0, off+rOff, 0, r), verb{op: opREAD, flags: fenced, off: off, bytes: slabBytes})
	require.Zero(t, le.Uint64(got[0]))
	_, v, ok = h.judge(off, born, got[1])
	require.True(t, ok)
	h.chain(verb{op: opWRITE, off: off + imageOff(v+1), data: h.image(off, "by hand", v+1, born, r)},
		h.cas(0, off+vOff, live|v, live|(v+1)), h.cas(fenced, off+rOff, r, 0))
	b, err = c.Read(t.Context(), ref, nil)
	require.NoError(t, err)
	require.Equal(t, "by hand", string(b))

	// Free, and give back: R first, then the bit, then a look behind it.
	r = h.reservation()
	got = h.chain(h.cas(0, off+rOff, 0, r), verb{op: opREAD, flags: fenced, off: off, bytes: slabBytes})
	_, v, ok = h.judge(off, born, got[1])
	require.True(t, ok)
	h.chain(h.cas(0, off+vOff, live|v, free|(v+1)), h.cas(fenced, off+rOff, r, 0))
	_, _, ok = h.look(off, born)
	require.False(t, ok)
	_, err = c.Read(t.Context(), ref, nil)
	require.ErrorIs(t, err, client.ErrFreed)
	got = h.chain(h.cas(0, word, 1<<slab, 0), verb{op: opREAD, flags: fenced, off: off + rOff, bytes: 16})
	require.Zero(t, le.Uint64(got[1]), "nobody has claimed it meanwhile")

	// Refusals: a key that is not one, and a window's end.
	key := h.key
	h.key++
	_, err = h.conn.Write(append(append(le.AppendUint16([]byte{1, 0}, 1), make([]byte, 12)...), append(le.AppendUint64(nil, h.key), append([]byte{opREAD, 0, 0, 0, 8, 0, 0, 0}, make([]byte, 24)...)...)...))
	require.NoError(t, err)
	require.EqualValues(t, 1, h.read(16)[1], "access key not valid")
	h.key = key

	var nothing struct{}
	h.rpc("CloseSession", map[string]any{"serial": h.serial, "proof": h.proof}, &nothing)
	rep, err := fsck.Cluster(t.Context(), fsck.Config{Controllers: []string{h.url}})
	require.NoError(t, err)
	require.Empty(t, rep.Findings)
}
