package deploytest

import (
	"bytes"
	bin "encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/tcp"
)

// table is the rows of the first table of docs/PROTOCOL.md whose head begins like that.
func table(t *testing.T, head ...string) (rows [][]string) {
	t.Helper()
	lines := strings.Split(read(t, "docs", "PROTOCOL.md"), "\n")
	for i, l := range lines {
		if !strings.HasPrefix(l, "| "+strings.Join(head, " | ")+" |") {
			continue
		}
		for _, l := range lines[i+2:] {
			if !strings.HasPrefix(l, "|") {
				return rows
			}
			var row []string
			for _, cell := range strings.Split(strings.Trim(l, "|"), "|") {
				row = append(row, strings.TrimSpace(cell))
			}
			rows = append(rows, row)
		}
	}
	require.NotEmpty(t, rows, "docs/PROTOCOL.md has no table %q", head)
	return rows
}

func number(t *testing.T, s string) int {
	t.Helper()
	n, err := strconv.Atoi(s)
	require.NoError(t, err)
	return n
}

func TestProtocolPageConstants(t *testing.T) {
	want := map[string]int{
		"layout version, in region headers": proto.LayoutVersion, "fabric version, in challenge, hello and welcome": host.ProtocolVersion,
		"challenge bytes": host.ChallengeBytes, "hello bytes": host.HelloBytes, "welcome bytes": host.WelcomeBytes, "open request bytes": host.OpenRequestBytes, "open answer bytes": host.OpenAnswerBytes,
		"ticket bytes": rdma.TicketBytes, "most verbs in a chain": rdma.MaxChainVerbs, "most bytes of one READ or WRITE": rdma.MaxVerbBytes,
		"most bytes of the READs and WRITEs of a chain": rdma.MaxChainBytes, "windows of a connection": host.MaxWindows,
	}
	found := 0
	for _, row := range table(t, "constant", "value") {
		if n, ok := want[row[0]]; ok {
			found++
			require.Equal(t, n, number(t, row[1]), row[0])
		}
	}
	require.Equal(t, len(want), found)
	require.Contains(t, read(t, "docs", "PROTOCOL.md"), "| verbs socket | 4 |")
	require.Regexp(t, `(?m)^\tversion = 4$`, strings.ReplaceAll(read(t, "rdma", "verbs", "message.go"), "version   ", "version "))
}

// Every field of every word is where the page says: a word with that field alone all
// ones has these bits.
func TestProtocolPageWords(t *testing.T) {
	const all = ^uint64(0)
	img := func(h proto.ImageHeader, at int) uint64 {
		b := make([]byte, proto.ImageLen(1<<20))
		return proto.Word(proto.EncodeImage(b, 0, h), at)
	}
	words := map[string]uint64{
		"V version": uint64(proto.MakeV(0, proto.MaxVersion)), "V state": uint64(proto.MakeV(3, 0)), "V open": uint64(proto.V(0).Open()),
		"R sequence": uint64(proto.MakeR(0, proto.MaxSequence)), "R session": uint64(proto.MakeR(proto.MaxSession, 0)),
		"header session":    uint64(proto.MakeHeader(0, 0, 0, 0, proto.MaxSession)),
		"header generation": uint64(proto.MakeHeader(0, 0, 0, proto.MaxGeneration, 0)),
		"header class":      uint64(proto.MakeHeader(0, 0, 1<<proto.ClassBits-1, 0, 0)),
		"header kind":       uint64(proto.MakeHeader(0, 3, 0, 0, 0)),
		"header state":      uint64(proto.MakeHeader(7, 0, 0, 0, 0)),
		"address offset":    uint64(proto.MakeAddr(0, 1<<32-1)), "address region": uint64(proto.MakeAddr(1<<32-1, 0)),
		"incarnation born": uint64(proto.MakeIncarnation(0, proto.MaxVersion)), "incarnation generation": uint64(proto.MakeIncarnation(proto.MaxGeneration, 0)),
		"length, version version": img(proto.ImageHeader{Version: proto.MaxVersion}, 8),
		"length, version length":  img(proto.ImageHeader{Length: 1<<proto.LengthBits - 1}, 8),
		"tag, born born":          img(proto.ImageHeader{Born: proto.MaxVersion}, 16),
		"tag, born tag":           img(proto.ImageHeader{Tag: proto.MaxTag}, 16),
	}
	for _, row := range table(t, "word", "field", "lowest bit", "bits") {
		name := row[0] + " " + row[1]
		require.Contains(t, words, name)
		low, bits := number(t, row[2]), number(t, row[3])
		require.Equal(t, all>>(64-bits)<<low, words[name], name)
		delete(words, name)
	}
	require.Empty(t, words)
	for _, row := range table(t, "word", "value", "name") {
		n := number(t, row[1])
		got := map[string]string{"V": proto.State(n).String(), "header": proto.BlockState(n).String(), "kind": proto.Kind(n).String()}[row[0]]
		require.Equal(t, row[2], got, row[0])
	}
	require.Len(t, table(t, "word", "value", "name"), 3+5+3)
}

// The table of classes is that of the code, and so are the slabs of round payloads.
func TestProtocolPageClasses(t *testing.T) {
	c := proto.Class(0)
	for _, row := range table(t, "classes", "slab bytes") {
		require.Regexp(t, fmt.Sprintf(`^%d to \d+$`, c), row[0])
		for _, size := range strings.Fields(row[1]) {
			require.Equal(t, c.Bytes(), number(t, size))
			c++
		}
		require.True(t, strings.HasSuffix(row[0], fmt.Sprintf(" to %d", c-1)), row[0])
	}
	require.EqualValues(t, proto.Classes, c)
	require.Contains(t, read(t, "docs", "PROTOCOL.md"), fmt.Sprintf("PAIR from class %d on, STAGED up to class %d.", proto.MinPairClass, proto.MaxStagedClass))
	payloads := []string{"128", "300", "512", "1024", "1500", "4096", "16384"}
	rows := table(t, append([]string{"payload, bytes"}, payloads...)...)
	for i, p := range payloads {
		best, ok := proto.ClassFor(number(t, p), proto.Single)
		require.True(t, ok)
		require.Equal(t, best.Bytes(), number(t, rows[0][i+1]))
		require.Equal(t, fmt.Sprintf("%.2f", float64(best.Bytes())/float64(number(t, p))), rows[1][i+1])
	}
}

func TestProtocolPagePlaces(t *testing.T) {
	for _, row := range table(t, "region MiB", "blocks") {
		g, err := proto.NewGeometry(uint64(number(t, row[0])) << 20)
		require.NoError(t, err)
		require.Equal(t, []string{fmt.Sprint(g.Blocks), fmt.Sprint(g.MapOff(0)), fmt.Sprint(g.DataOff())}, row[1:], row[0])
	}
	// Formulas over S, for every class.
	place := func(formula string, s int) int {
		m := regexp.MustCompile(`^(?:(S)(?:/(\d))?)?([+-]?\d+)?$`).FindStringSubmatch(formula)
		require.NotNil(t, m, formula)
		n := 0
		if m[1] != "" {
			n = s
		}
		if m[2] != "" {
			n /= number(t, m[2])
		}
		if m[3] != "" {
			n += number(t, m[3])
		}
		return n
	}
	kinds := 0
	for _, row := range table(t, "kind", "image A", "R", "V") {
		kinds++
		kind := map[string]proto.Kind{"PAIR": proto.Pair, "SINGLE": proto.Single}[row[0]]
		for c := proto.Class(0); c < proto.Classes; c++ {
			if kind == proto.Pair && c < proto.MinPairClass {
				continue
			}
			s := proto.Slab{Off: 1 << 20, Class: c, Kind: kind}
			require.EqualValues(t, s.ImageOff(0)-s.Off, place(row[1], c.Bytes()))
			require.EqualValues(t, s.ROff()-s.Off, place(row[2], c.Bytes()))
			require.EqualValues(t, s.VOff()-s.Off, place(row[3], c.Bytes()))
			if kind == proto.Pair {
				require.EqualValues(t, s.ImageOff(1)-s.Off, place(row[4], c.Bytes()))
			}
			require.Equal(t, c.ImageBytes(kind), place(row[5], c.Bytes()))
		}
	}
	require.Equal(t, 2, kinds)

	h := proto.RegionHeader{Domain: 2, Kind: proto.RegionRaw, UUID: [16]byte{1, 2, 3}, Cluster: [16]byte{4, 5, 6}, RegionBytes: 64 << 20, Region: 7, Incarnation: 8, Epoch: 9}
	b := h.Encode()
	at := map[string]func(off int) bool{
		"magic `QUARRY\\r\\n`":                                   func(off int) bool { return bytes.HasPrefix(b[off:], []byte("QUARRY\r\n")) },
		"layout version, 32 bits":                                func(off int) bool { return bin.LittleEndian.Uint32(b[off:]) == proto.LayoutVersion },
		"domain, 16 bits: 1 CPU, 2 adapter":                      func(off int) bool { return bin.LittleEndian.Uint16(b[off:]) == 2 },
		"kind, 16 bits: 0 slabs, 1 raw, 2 slabs with open words": func(off int) bool { return bin.LittleEndian.Uint16(b[off:]) == 1 },
		"region uuid":                                            func(off int) bool { return bytes.Equal(b[off:off+16], h.UUID[:]) },
		"cluster uuid":                                           func(off int) bool { return bytes.Equal(b[off:off+16], h.Cluster[:]) },
		"size":                                                   func(off int) bool { return proto.Word(b, off) == h.RegionBytes },
		"region number":                                          func(off int) bool { return proto.Word(b, off) == 7 },
		"incarnation":                                            func(off int) bool { return proto.Word(b, off) == 8 },
		"epoch":                                                  func(off int) bool { return proto.Word(b, off) == 9 },
		"checksum: XXH3-64 of the bytes before":                  func(off int) bool { b[off]++; _, err := proto.DecodeRegionHeader(b); b[off]--; return err != nil },
	}
	for _, row := range table(t, "region header", "offset") {
		require.Contains(t, at, row[0])
		require.True(t, at[row[0]](number(t, row[1])), row[0])
		delete(at, row[0])
	}
	require.Empty(t, at)
	require.Equal(t, 262096, proto.Class(47).PayloadBytes(proto.Single))
	require.Equal(t, proto.TagIndex, uint32(1)<<19)
	require.Equal(t, proto.TagChunk, uint32(1)<<18)
}

// dump is bytes as the page shows them: words of 8 bytes in memory order, four a line.
func dump(b []byte) string {
	var out strings.Builder
	for i := 0; i < len(b); i += 8 {
		sep := " "
		if i%32 == 24 || i+8 >= len(b) {
			sep = "\n"
		}
		out.WriteString(hex.EncodeToString(b[i:min(i+8, len(b))]) + sep)
	}
	return out.String()
}

// imageExample is the image of the page.
func imageExample() []byte {
	var uuid [16]byte
	for i := range uuid {
		uuid[i] = byte(i)
	}
	img := make([]byte, 64)
	copy(img[proto.ImageHeaderBytes:], "hello")
	return proto.EncodeImage(img, proto.Seed(proto.RegionSeed(uuid), 0x500080, 2), proto.ImageHeader{Length: 5, Version: 1, Born: 1, Writer: proto.MakeR(3, 9)})
}

// chainExample is the chain of the page, as the tcp provider sends it.
func chainExample(t *testing.T) []byte {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	frame := make(chan []byte, 1)
	go func() { // a node that listens and says only what it must
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		ch := host.Challenge{Node: 1, Incarnation: 1}
		_, _ = c.Write(ch.Append(nil))
		b := make([]byte, host.HelloBytes)
		if _, err := readFull(c, b); err != nil {
			return
		}
		w := host.Welcome{Node: 1, Incarnation: 1}
		_, _ = c.Write(w.Append(nil))
		for seq := byte(0); ; seq++ { // open until its sequence number would be 4, then the chain
			head := make([]byte, 24)
			if _, err := readFull(c, head); err != nil {
				return
			}
			if head[0] == 1 {
				rest := make([]byte, 64)
				_, _ = readFull(c, rest)
				frame <- append(head, rest...)
				return
			}
			request := make([]byte, host.OpenRequestBytes)
			if _, err := readFull(c, request); err != nil {
				return
			}
			q, _ := host.DecodeOpenRequest(request)
			a := host.OpenAnswer{Tag: q.Tag, Key: 0x2a, Bytes: 16 << 20}
			out := make([]byte, 16)
			out[0] = 2
			copy(out[4:], head[4:8])
			bin.LittleEndian.PutUint32(out[8:], host.OpenAnswerBytes)
			bin.LittleEndian.PutUint32(out[12:], 1)
			_, _ = c.Write(a.Append(out))
		}
	}()
	conn, err := tcp.Dialer{}.Dial(t.Context(), l.Addr().String(), &rdma.Credentials{Ticket: rdma.Ticket{Rights: rdma.ReadWrite}}, 0)
	require.NoError(t, err)
	defer conn.Close()
	var w rdma.Window
	w, err = conn.Open(t.Context(), 7, 1)
	require.NoError(t, err)
	var r rdma.Round
	c := r.Chain(&rdma.Target{Conn: conn, Window: w})
	c.CAS(0x500140, 0, uint64(proto.MakeR(3, 9)))
	c.Read(0x500100, make([]byte, 128))
	c.Fenced()
	rdma.Do(&r)
	b := <-frame
	bin.LittleEndian.PutUint32(b[4:], 5) // whatever number the connection had come to
	return b
}

func readFull(c net.Conn, b []byte) (n int, err error) {
	for n < len(b) && err == nil {
		var k int
		k, err = c.Read(b[n:])
		n += k
	}
	return n, err
}

// The worked examples are what the code makes.
func TestProtocolPageExamples(t *testing.T) {
	page := read(t, "docs", "PROTOCOL.md")
	for _, b := range [][]byte{imageExample(), chainExample(t)} {
		if !strings.Contains(page, "```text\n"+dump(b)+"```") {
			t.Errorf("docs/PROTOCOL.md has not got:\n%s", dump(b))
		}
	}
	require.Equal(t, "7:0x00500040/0.17", proto.Ref{Addr: proto.MakeAddr(7, 0x500040), Incarnation: proto.MakeIncarnation(0, 17)}.String())
}

func TestProtocolPageMessages(t *testing.T) {
	want := map[string]bool{}
	methods := quarrypb.File_quarry_proto.Services().ByName("Controller").Methods()
	for i := range methods.Len() {
		want[string(methods.Get(i).Name())] = true
	}
	for _, row := range table(t, "method", "who calls it") {
		require.True(t, want[row[0]], "%s is no method", row[0])
		delete(want, row[0])
	}
	require.Empty(t, want, "not on the page")

	codes := table(t, "code", "means")
	require.Len(t, codes, len(rdma.Refusals)+2)
	for i, cause := range rdma.Refusals {
		require.Equal(t, fmt.Sprint(i+1), codes[i+1][0])
		require.True(t, strings.HasPrefix(cause.Error(), codes[i+1][1]), "%s: %v", codes[i+1][1], cause)
		require.EqualValues(t, i+1, host.Code(cause))
	}
	require.Equal(t, "255", codes[len(codes)-1][0])
	require.EqualValues(t, 255, host.Code(rdma.ErrBroken))
	for _, row := range table(t, "op", "verb") {
		require.Equal(t, row[1], rdma.Op(number(t, row[0])).String())
	}
	require.Len(t, table(t, "op", "verb"), rdma.Ops-1)

	// Where the fields of challenge, hello and ticket are.
	ch := host.Challenge{Node: 0x77, Incarnation: 0x88, Nonce: [32]byte{0x99}, TLS: host.RequiredTLS}
	fieldsAt(t, "challenge", ch.Append(nil), [][]byte{[]byte("QUARRYV\n"), {host.ProtocolVersion, 0}, {2, 0}, {0x77}, {0x88}, {0x99}})
	h := host.Hello{Lane: 0x11111111, Attempt: 0x2222222222222222, Ticket: rdma.Ticket{Cluster: [16]byte{0x33}, Session: 0x4444, Serial: 0x55555555, Rights: rdma.ReadWrite, Lanes: 0xee, Tenant: 0x6666, Region: 0xaa, Epoch: 0xbb, Holder: keyring.Public{0xcc}}, Proof: keyring.Signature{0xdd}}
	signer := keyring.NewSigner([32]byte{7})
	h.Ticket.Sign(signer)
	b := h.Append(nil)
	id := bin.LittleEndian.AppendUint64(nil, signer.ID())
	fieldsAt(t, "hello", b, [][]byte{[]byte("QUARRYV\n"), {host.ProtocolVersion, 0, 0, 0}, {0x11, 0x11, 0x11, 0x11}, {0x22, 0x22}, id, {0xdd}})
	fieldsAt(t, "ticket", b[24:24+rdma.TicketBytes], [][]byte{id, {0x33}, {0x44, 0x44}, {0x66, 0x66}, {0x55, 0x55}, {2}, {0xee}, {0xaa}, {0xbb}, {0xcc}, h.Ticket.Signature[:]})
	for _, row := range table(t, "gate page", "offset") {
		require.Contains(t, read(t, "rdma", "host", "gate.go"), fmt.Sprintf("%3d  %s ", number(t, row[1]), regexp.MustCompile(`^\w+`).FindString(row[0])))
	}
}

// fieldsAt compares the rows of a table with where fields are in an encoded form.
func fieldsAt(t *testing.T, name string, b []byte, fields [][]byte) {
	rows := table(t, name, "offset", "bytes")
	require.Len(t, rows, len(fields), name)
	end := 0
	for i, row := range rows {
		off := number(t, row[1])
		require.Equal(t, end, off, row[0])
		require.True(t, bytes.HasPrefix(b[off:], fields[i]), row[0])
		end = off + number(t, row[2])
	}
	require.Len(t, b, end, name)
}
