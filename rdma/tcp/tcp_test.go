package tcp

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/rdmatest"
)

var (
	testKey     = keyring.NewSigner([32]byte{1, 2, 3})
	testCluster = [16]byte{9}
)

// serve starts a node with one region of 16 MiB, number 1, epoch 1.
func serve(t testing.TB, l net.Listener) (*host.Access, string) { return serveTLS(t, l, nil) }

func serveTLS(t testing.TB, l net.Listener, how *TLS, prepare ...func(*host.Access)) (*host.Access, string) {
	a := host.New(testCluster, keyring.NewRing(testKey.Public()), 1, 77, host.Limits{})
	for _, f := range prepare {
		f(a)
	}
	m, err := host.NewMemory("test", proto.MinRegionBytes)
	require.NoError(t, err)
	require.NoError(t, a.OpenRegion(t.Context(), 1, 1, m))
	if l == nil {
		l, err = net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
	}
	s := NewServer(a, nil)
	s.TLS = how
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Close()
		require.NoError(t, <-done)
		require.NoError(t, a.Close(context.Background()))
		require.NoError(t, m.Close())
	})
	return a, l.Addr().String()
}

func ticket(serial uint64) *rdma.Credentials {
	return rdma.Issue(testKey, rdma.Ticket{Cluster: testCluster, Session: 5, Serial: serial, Rights: rdma.ReadWrite})
}

func dial(t testing.TB, addr string, serial uint64, lane uint32) *rdma.Target {
	c, err := Dialer{}.Dial(context.Background(), addr, ticket(serial), lane)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	w, err := c.Open(context.Background(), 1, 1)
	require.NoError(t, err)
	return &rdma.Target{Conn: c, Window: w}
}

func do(to *rdma.Target, deadline int64, f func(*rdma.Chain)) *rdma.Chain {
	r := rdma.Round{Deadline: deadline}
	f(r.Chain(to))
	rdma.Do(&r)
	return r.At(0)
}

// stalling is a node that welcomes everyone and then says nothing.
func stalling(t *testing.T) (addr string, release func()) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	stop := make(chan struct{})
	done := make(chan struct{})
	var conns sync.WaitGroup
	go func() {
		defer close(done)
		for {
			nc, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				defer nc.Close()
				c := host.Challenge{Node: 1, Incarnation: 77}
				nc.Write(c.Append(nil))
				var hello [host.HelloBytes]byte
				io.ReadFull(nc, hello[:])
				w := host.Welcome{Node: 1, Incarnation: 1}
				nc.Write(w.Append(nil))
				<-stop
			})
		}
	}()
	return l.Addr().String(), func() { l.Close(); close(stop); <-done; conns.Wait() }
}

func TestDeadlines(t *testing.T) {
	addr, release := stalling(t)
	defer release()
	for _, size := range []int{8, rdma.MaxVerbBytes} { // that the socket takes, and that it does not
		c, err := Dialer{}.Dial(t.Context(), addr, ticket(1), 0)
		require.NoError(t, err)
		to := &rdma.Target{Conn: c, Window: rdma.Window{Bytes: 1 << 30, Key: 1}}
		buf := make([]byte, size)
		began := time.Now()
		ch := do(to, clock.In(30*time.Millisecond), func(c *rdma.Chain) {
			for range min(4, rdma.MaxChainBytes/size) {
				c.Write(0, buf)
			}
		})
		require.ErrorIs(t, ch.Err, rdma.ErrBroken)
		require.GreaterOrEqual(t, time.Since(began), 30*time.Millisecond)
		require.Less(t, time.Since(began), time.Minute, "nothing else ends it")
		ch = do(to, 0, func(c *rdma.Chain) { c.Read(0, buf) })
		require.ErrorIs(t, ch.Err, rdma.ErrBroken, "broken until Reset")
		c.Close()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	c, err := Dialer{}.Dial(t.Context(), addr, ticket(1), 0)
	if err == nil {
		_, err = c.Open(ctx, 1, 1)
		c.Close()
	}
	require.ErrorIs(t, err, rdma.ErrBroken)
}

// A deadline that passes early for a later chain is moved, not believed.
func TestDeadlineMoves(t *testing.T) {
	_, addr := serve(t, nil)
	buf := make([]byte, 8)
	var to *rdma.Target
	for lane := uint32(0); ; lane++ { // until a chain is over before its short deadline
		to = dial(t, addr, 1, lane)
		if do(to, clock.In(20*time.Millisecond), func(c *rdma.Chain) { c.Read(0, buf) }).Err == nil {
			break
		}
	}
	end := time.Now().Add(120 * time.Millisecond)
	for time.Now().Before(end) {
		require.NoError(t, do(to, clock.In(time.Minute), func(c *rdma.Chain) { c.Read(0, buf) }).Err)
	}
	require.NoError(t, do(to, 0, func(c *rdma.Chain) { c.Read(0, buf) }).Err)
	require.NoError(t, do(to, clock.In(time.Minute), func(c *rdma.Chain) { c.Read(0, buf) }).Err)
}

// raw is a connection that has been welcomed.
func raw(t *testing.T, addr string, serial uint64, lane uint32) net.Conn {
	nc, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { nc.Close() })
	_, err = nc.Write(rdmatest.Hello(t, nc, ticket(serial), lane))
	require.NoError(t, err)
	var w [host.WelcomeBytes]byte
	_, err = io.ReadFull(nc, w[:])
	require.NoError(t, err)
	got, err := host.DecodeWelcome(w[:])
	require.NoError(t, err)
	require.NoError(t, got.Err)
	return nc
}

// ends says that the node has given the connection up.
func ends(t *testing.T, nc net.Conn) {
	nc.SetReadDeadline(time.Now().Add(time.Minute))
	_, err := io.Copy(io.Discard, nc)
	require.False(t, errors.Is(err, os.ErrDeadlineExceeded), "still connected")
}

// Frames that lie about their lengths end the connection; nobody else notices, and
// no memory is held for what was claimed.
func TestSecurity04_LyingFrames(t *testing.T) {
	_, addr := serve(t, nil)
	good := dial(t, addr, 99, 0)
	frame := func(h head, verbs ...rdma.Verb) []byte {
		b := h.append(nil)
		for i := range verbs {
			b = host.AppendVerb(b, &verbs[i])
		}
		return b
	}
	write := func(n uint32) []byte {
		b := frame(head{kind: kindChain, verbs: 1, seq: 1, payload: n}, rdma.Verb{Op: rdma.Write})
		binary.LittleEndian.PutUint32(b[headBytes+4:], n)
		return b
	}
	patched := func(at int, v byte) []byte {
		b := frame(head{kind: kindChain, verbs: 1, seq: 1}, rdma.Verb{Op: rdma.Read, Buf: make([]byte, 8)})
		b[at] = v
		return b
	}
	for name, b := range map[string][]byte{
		"garbage":               bytes.Repeat([]byte("quarry? "), 100),
		"kind 0":                patched(0, 0),
		"kind 3":                patched(0, 3),
		"flag of the head":      patched(1, 1),
		"no verbs":              frame(head{kind: kindChain, seq: 1}),
		"257 verbs":             frame(head{kind: kindChain, seq: 1, verbs: 257}),
		"65535 verbs":           frame(head{kind: kindChain, seq: 1, verbs: 65535}),
		"payload 2^32-1":        write(1<<32 - 1),
		"payload 2^31":          write(1 << 31),
		"write of 1 MiB + 1":    write(1<<20 + 1),
		"payload without write": patched(8, 8),
		"farewell":              frame(head{kind: kindChain, seq: farewellSeq, verbs: 1}),
		"op 0":                  patched(headBytes, 0),
		"op 7":                  patched(headBytes, 7),
		"verify of 1 MiB + 1":   frame(head{kind: kindChain, seq: 1, verbs: 1}, rdma.Verb{Op: rdma.Verify, Bytes: 1<<20 + 1}),
		"flags of a verb":       patched(headBytes+1, 4),
		"spare of a verb":       patched(headBytes+3, 1),
		"open with verbs":       frame(head{kind: kindOpen, seq: 1, verbs: 1}),
		"5 MiB of reads": frame(head{kind: kindChain, seq: 1, verbs: 5}, func() (v []rdma.Verb) {
			for range 5 {
				v = append(v, rdma.Verb{Op: rdma.Read, Buf: make([]byte, 1<<20)})
			}
			return
		}()...),
		"5 MiB of verifies": frame(head{kind: kindChain, seq: 1, verbs: 5}, slices.Repeat([]rdma.Verb{{Op: rdma.Verify, Bytes: 1 << 20}}, 5)...),
	} {
		t.Run(name, func(t *testing.T) {
			nc := raw(t, addr, 1, 0)
			_, err := nc.Write(b)
			require.NoError(t, err)
			ends(t, nc)
		})
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for lane := range uint32(50) { // claims of 4 MiB each, of which nothing comes
		nc := raw(t, addr, 2, lane)
		h := head{kind: kindChain, verbs: 4, seq: 1, payload: 4 << 20}
		b := h.append(nil)
		for range 4 {
			b = host.AppendVerb(b, &rdma.Verb{Op: rdma.Write, Buf: make([]byte, 1<<20)})
		}
		nc.Write(b[:headBytes+20])
	}
	runtime.ReadMemStats(&after)
	require.Less(t, after.HeapAlloc, before.HeapAlloc+32<<20)
	require.NoError(t, do(good, 0, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err)
}

// Connections that say nothing, or the wrong thing, never become sessions and do
// not keep others out.
func TestSecurity06_PreAuth(t *testing.T) {
	a, addr := serve(t, nil)
	var silent []net.Conn
	for range maxPreAuth + 50 {
		nc, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		defer nc.Close()
		silent = append(silent, nc)
	}
	ends(t, silent[0]) // the oldest made room
	good := dial(t, addr, 1, 0)
	require.NoError(t, do(good, 0, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err)
	for _, b := range [][]byte{make([]byte, host.HelloBytes), bytes.Repeat([]byte("GET / HTTP/1.1\r\n"), 6)} {
		nc, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		nc.Write(b)
		ends(t, nc)
		nc.Close()
	}
	require.Len(t, a.Sessions(), 1)
}

// HAZARDS, security 3: a session that keeps guessing is ended, on all its lanes.
func TestSecurity03_OffendersAreEnded(t *testing.T) {
	a, addr := serve(t, nil)
	to, other, bystander := dial(t, addr, 1, 0), dial(t, addr, 1, 1), dial(t, addr, 2, 0)
	stale := *to
	stale.Window.Key++
	n := 0
	for ; n < 5000; n++ {
		if err := do(&stale, 0, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err; !errors.Is(err, rdma.ErrKey) {
			require.ErrorIs(t, err, rdma.ErrRevoked)
			break
		}
	}
	require.Equal(t, 1001, n)
	require.Error(t, do(other, 0, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err)
	require.ErrorIs(t, to.Conn.Reset(t.Context()), rdma.ErrRevoked)
	require.NoError(t, do(bystander, 0, func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err)
	require.EqualValues(t, 1, a.Counters().Expelled)
	require.EqualValues(t, 1001, a.Counters().Refused[rdma.ErrKey.Error()])
}

// The farewell makes a revocation a definite answer, also for a lane that was idle.
func TestFarewell(t *testing.T) {
	a, addr := serve(t, nil)
	to := dial(t, addr, 1, 0)
	require.NoError(t, a.Fence(t.Context(), 1))
	for range 3 {
		c := do(to, clock.In(time.Minute), func(c *rdma.Chain) { c.FetchAdd(0, 1) })
		require.Error(t, c.Err)
		require.Zero(t, c.Done)
	}
}

// A client that does not read its answers is given up; others do not wait for it.
func TestClientThatDoesNotRead(t *testing.T) {
	_, addr := serve(t, nil)
	nc := raw(t, addr, 1, 0)
	nc.(*net.TCPConn).SetReadBuffer(4096)
	h := head{kind: kindOpen, seq: 1}
	o := host.OpenRequest{Region: 1, Epoch: 1}
	nc.Write(o.Append(h.append(nil)))
	b := make([]byte, answerBytes+host.OpenAnswerBytes)
	_, err := io.ReadFull(nc, b)
	require.NoError(t, err)
	w, err := host.DecodeOpenAnswer(b[answerBytes:])
	require.NoError(t, err)
	h = head{kind: kindChain, verbs: 4, seq: 2, key: w.Key}
	frame := h.append(nil)
	for range 4 {
		frame = host.AppendVerb(frame, &rdma.Verb{Op: rdma.Read, Buf: make([]byte, 1<<20)})
	}
	nc.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
	for err == nil {
		_, err = nc.Write(frame)
	}
	good := dial(t, addr, 1, 1)
	require.NoError(t, do(good, clock.In(time.Minute), func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err)
	again := dial(t, addr, 1, 0) // takes the stuck lane's place
	require.NoError(t, do(again, clock.In(time.Minute), func(c *rdma.Chain) { c.FetchAdd(0, 1) }).Err)
}

// Whatever a node answers, the client ends with an error and without panic.
func TestNodeThatLies(t *testing.T) {
	right := answer{kind: kindChain, done: 2, seq: 1, results: 72, last: true}
	for name, spoil := range map[string]func(a *answer){
		"kind":        func(a *answer) { a.kind = 7 },
		"seq":         func(a *answer) { a.seq = 2 },
		"done":        func(a *answer) { a.done = 3 },
		"less done":   func(a *answer) { a.done, a.results = 1, 64 },
		"results":     func(a *answer) { a.results = 1 << 31 },
		"few results": func(a *answer) { a.results = 71 },
		"farewell":    func(a *answer) { a.seq = farewellSeq },
		"code":        func(a *answer) { a.code = 200 },
	} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			defer l.Close()
			go func() {
				nc, err := l.Accept()
				if err != nil {
					return
				}
				defer nc.Close()
				c := host.Challenge{Node: 1, Incarnation: 77}
				nc.Write(c.Append(nil))
				var hello [host.HelloBytes]byte
				io.ReadFull(nc, hello[:])
				w := host.Welcome{Node: 1, Incarnation: 1}
				nc.Write(w.Append(nil))
				a, b := right, make([]byte, answerBytes+72)
				spoil(&a)
				a.put(b)
				nc.Write(b)
				io.Copy(io.Discard, nc)
			}()
			c, err := Dialer{}.Dial(t.Context(), l.Addr().String(), ticket(1), 0)
			require.NoError(t, err)
			defer c.Close()
			ch := do(&rdma.Target{Conn: c, Window: rdma.Window{Key: 1}}, clock.In(time.Minute), func(c *rdma.Chain) {
				c.Read(0, make([]byte, 64))
				c.FetchAdd(0, 1)
			})
			require.ErrorIs(t, ch.Err, rdma.ErrBroken)
		})
	}
}

func FuzzFrame(f *testing.F) {
	c := &rdma.Chain{To: &rdma.Target{}}
	c.Write(0, []byte("hello"))
	c.CAS(8, 1, 2)
	c.Read(0, make([]byte, 9))
	c.Flush(rdma.Persistent, 0, 8)
	h := head{kind: kindChain, verbs: 4, seq: 1, payload: 5, slot: 3, key: 9}
	b := h.append(nil)
	for i := range c.Verbs {
		b = host.AppendVerb(b, &c.Verbs[i])
	}
	f.Add(b)
	f.Add(make([]byte, headBytes))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < headBytes {
			return
		}
		h, err := decodeHead(b)
		if err != nil || h.kind == kindOpen || len(b) < headBytes+h.verbs*host.VerbBytes {
			return
		}
		raw := b[headBytes : headBytes+h.verbs*host.VerbBytes]
		verbs, results, err := host.DecodeVerbs(nil, raw, h.payload)
		if err != nil {
			return
		}
		if len(verbs) != h.verbs || results > rdma.MaxChainBytes+8*rdma.MaxChainVerbs {
			t.Fatalf("%d verbs, %d bytes of results", len(verbs), results)
		}
		again := h.append(nil)
		for i := range verbs {
			v := &verbs[i]
			if v.Op == rdma.Read || v.Op == rdma.Write {
				v.Buf, v.Bytes = make([]byte, v.Bytes), 0
			}
			again = host.AppendVerb(again, v)
		}
		more, results2, err := host.DecodeVerbs(nil, again[headBytes:], h.payload)
		if err != nil || results != results2 || len(more) != len(verbs) {
			t.Fatalf("decoding what was encoded: %v", err)
		}
		if rdma.WithinLimits(verbs) != nil {
			t.Fatal("a frame above the limits was taken")
		}
	})
}

// FuzzStream sends anything to a node behind a good hello, and looks whether the
// node lives.
func FuzzStream(f *testing.F) {
	_, addr := serve(f, nil)
	good := dial(f, addr, 2, 0)
	h := head{kind: kindChain, verbs: 1, seq: 1}
	f.Add(h.append(nil))
	o := host.OpenRequest{Region: 1, Epoch: 1}
	h = head{kind: kindOpen, seq: 1}
	f.Add(o.Append(h.append(nil)))
	f.Fuzz(func(t *testing.T, b []byte) {
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			t.Skip(err)
		}
		nc.Write(append(rdmatest.Hello(t, nc, ticket(3), 1), b...))
		nc.(*net.TCPConn).CloseWrite()
		nc.SetReadDeadline(time.Now().Add(time.Minute))
		if _, err := io.Copy(io.Discard, nc); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("hung")
		}
		nc.Close()
		if err := do(good, clock.In(time.Minute), func(c *rdma.Chain) { c.FetchAdd(0, 0) }).Err; err != nil {
			t.Fatal(err)
		}
	})
}

// READs into neighbouring memory come in as one; what lies between, behind or out
// of turn is left alone.
func TestReadsIntoAdjacentMemory(t *testing.T) {
	mem := make([]byte, 64)
	read := func(from, to int) rdma.Verb { return rdma.Verb{Op: rdma.Read, Buf: mem[from:to]} }
	for name, c := range map[string]struct {
		verbs []rdma.Verb
		bytes int
		more  int
	}{
		"one":                {[]rdma.Verb{read(0, 8)}, 8, 0},
		"three in a row":     {[]rdma.Verb{read(0, 8), read(8, 24), read(24, 25)}, 25, 2},
		"a gap":              {[]rdma.Verb{read(0, 8), read(9, 16)}, 8, 0},
		"backwards":          {[]rdma.Verb{read(8, 16), read(0, 8)}, 8, 0},
		"a word between":     {[]rdma.Verb{read(0, 8), {Op: rdma.CompareSwap}, read(8, 16)}, 8, 0},
		"no more capacity":   {[]rdma.Verb{{Op: rdma.Read, Buf: mem[0:8:8]}, read(8, 16)}, 8, 0},
		"part of the room":   {[]rdma.Verb{{Op: rdma.Read, Buf: mem[0:8:12]}, read(8, 16)}, 8, 0},
		"an empty one":       {[]rdma.Verb{read(0, 8), read(8, 8), read(8, 16)}, 8, 0},
		"up to the last":     {[]rdma.Verb{read(48, 56), read(56, 64)}, 16, 1},
		"the same once more": {[]rdma.Verb{read(0, 8), read(0, 8)}, 8, 0},
	} {
		buf, more := adjacent(c.verbs)
		require.Len(t, buf, c.bytes, name)
		require.Equal(t, c.more, more, name)
		require.Same(t, &c.verbs[0].Buf[0], &buf[0], name)
	}
}

// A hello that was seen on the wire is refused on every other connection, as it was and with
// another lane or attempt.
func TestHelloIsNotReplayed(t *testing.T) {
	_, addr := serve(t, nil)
	open := func(answer func(nc net.Conn) []byte) host.Welcome {
		nc, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		defer nc.Close()
		_, err = nc.Write(answer(nc))
		require.NoError(t, err)
		var b [host.WelcomeBytes]byte
		_, err = io.ReadFull(nc, b[:])
		require.NoError(t, err)
		w, err := host.DecodeWelcome(b[:])
		require.NoError(t, err)
		return w
	}
	var seen []byte
	require.NoError(t, open(func(nc net.Conn) []byte { seen = rdmatest.Hello(t, nc, ticket(1), 3); return seen }).Err)
	for name, change := range map[string]func(b []byte){"as it was": func([]byte) {}, "another lane": func(b []byte) { b[12]++ }, "a later attempt": func(b []byte) { b[23]++ }} {
		w := open(func(nc net.Conn) []byte {
			rdmatest.Hello(t, nc, ticket(1), 3) // takes the challenge
			b := slices.Clone(seen)
			change(b)
			return b
		})
		require.ErrorIs(t, w.Err, rdma.ErrTicket, name)
	}
}

// A peer of an earlier version is told which one the node speaks.
func TestVersionIsTold(t *testing.T) {
	_, addr := serve(t, nil)
	nc, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer nc.Close()
	var b [host.WelcomeBytes]byte // what version 2 reads first
	_, err = io.ReadFull(nc, b[:])
	require.NoError(t, err)
	b[8]++
	_, err = host.DecodeWelcome(b[:])
	require.ErrorContains(t, err, fmt.Sprintf("the peer has version %d, this build %d", host.ProtocolVersion+1, host.ProtocolVersion))
	require.NotContains(t, err.Error(), "layout version 1")
	b[8] = 3
	_, err = host.DecodeWelcome(b[:])
	require.ErrorContains(t, err, "the peer has layout version 1")
	require.ErrorContains(t, err, "quarry kv dump")
}
