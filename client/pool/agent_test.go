package pool

import (
	"encoding/binary"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// agentOn runs an agent in this process. finish waits for its end.
func agentOn(t *testing.T, cl *client.Client, silence time.Duration) (in *io.PipeWriter, out *io.PipeReader, finish func() error) {
	r, in := io.Pipe()
	out, w := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := serve(t.Context(), cl, r, w, silence)
		w.Close()
		r.Close()
		ended <- err
	}()
	_, _, err := readGreeting(out)
	require.NoError(t, err)
	_, _ = in.Write(greeting(0)) // the agent may have ended
	return in, out, func() error { return <-ended }
}

// request makes a request and returns its answer.
func request(t *testing.T, in io.Writer, out io.Reader, kind byte, body []byte) frame {
	_, err := in.Write(append(appendFrame(nil, kind, 5, len(body)), body...))
	require.NoError(t, err)
	for {
		f, err := readFrame(out, make([]byte, maxBody))
		require.NoError(t, err)
		if f.kind != frameAlive {
			require.EqualValues(t, 5, f.id)
			return f
		}
	}
}

// TestRequestsThatAreWrong: an agent refuses each, changes nothing, and goes on.
func TestRequestsThatAreWrong(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 1})
	in, out, finish := agentOn(t, c.Connect(client.Config{}), defaultSilence)
	const size = 100_000
	create := control{Name: "p", Bytes: size, Attr: encodeAttr(Attr{}), Replicas: 1, RegionBytes: 1 << 20}.encode()
	for _, x := range []struct {
		kind byte
		body string
		is   error
	}{
		{opPersist, "12345678x", ErrClosed}, {opCompare, string(appendWords(nil, 0, 1, 1)), ErrClosed}, {opClose, "", ErrClosed}, {opOwn, "{}", ErrClosed},
		{opLook, "{}", client.ErrArgument}, {opLook, `{"name":"none"}`, client.ErrNoName}, {opLook, "[]", nil}, {opLook, "{} {}", nil}, {opLook, `{"other":1}`, nil},
		{opCreate, `{"name":"x","bytes":9}`, nil}, {opCreate, `{"name":"x","bytes":9,"attr":"AAAA"}`, nil}, {opOpen, `{"name":"x","attr":"AA=="}`, nil},
	} {
		f := request(t, in, out, x.kind, []byte(x.body))
		require.Equal(t, frameFailed, f.kind, x.body)
		if err := decodeError(f.body); x.is != nil {
			require.ErrorIs(t, err, x.is, x.body)
		} else {
			require.ErrorContains(t, err, errFrame.Error(), x.body)
		}
	}
	require.Equal(t, frameDone, request(t, in, out, opCreate, create).kind)
	require.Equal(t, frameDone, request(t, in, out, opPersist, append(appendWords(nil, 7), "bytes"...)).kind)
	for kind, want := range map[byte]error{opCreate: client.ErrArgument, opOpen: client.ErrArgument, opLook: client.ErrArgument, opRemove: client.ErrArgument} {
		require.ErrorIs(t, decodeError(request(t, in, out, kind, create).body), want, "one pool a stream")
	}
	r := rand.New(rand.NewPCG(1, 1))
	for i := range 2000 {
		kind := opPersist + byte(r.IntN(5))
		words := [3]uint64{}
		for k := range words {
			words[k] = []uint64{0, 1, 8, size - 1, size, size + 1, 1 << 20, 1<<20 + 1, 1 << 63, ^uint64(0), ^uint64(7)}[r.IntN(11)]
		}
		body := appendWords(nil, words[:r.IntN(4)]...)
		f := request(t, in, out, kind, append(body, make([]byte, r.IntN(3))...))
		require.True(t, f.kind == frameDone || f.kind == frameFailed, "%d", i)
		if kind == opPersist || kind == opDeepPersist {
			// What was in the range is written again, so that the end of the test finds other changes.
			_ = request(t, in, out, opPersist, append(appendWords(nil, 0), make([]byte, 64)...))
			_ = request(t, in, out, opPersist, append(appendWords(nil, size-64), make([]byte, 64)...))
		}
	}
	require.Equal(t, frameDone, request(t, in, out, opPersist, append(appendWords(nil, 7), "bytes"...)).kind)
	f := request(t, in, out, opRead, appendWords(nil, 0, size))
	require.Equal(t, frameDone, f.kind)
	want := make([]byte, size)
	copy(want[7:], "bytes")
	require.Equal(t, want, f.body)
	require.NoError(t, in.Close())
	require.NoError(t, finish())
	i, err := Stat(t.Context(), c.Connect(client.Config{}), "p")
	require.NoError(t, err)
	require.True(t, i.Dirty, "the stream has ended without opClose")
	require.Zero(t, i.Owner)
}

// TestAgentKeepsOwners: an agent stores and tells who is the last owner of its pool and that it is torn, also from its creation on.
func TestAgentKeepsOwners(t *testing.T) {
	ctx := t.Context()
	cl := testcluster.New(t, testcluster.Options{Nodes: 1}).Connect(client.Config{})
	type state struct {
		token string
		torn  bool
	}
	do := func(in io.Writer, out io.Reader, kind byte, c control) state {
		c.Name = "p"
		f := request(t, in, out, kind, c.encode())
		require.Equal(t, frameDone, f.kind, "%s", f.body)
		answer, err := decodeControl(f.body)
		require.NoError(t, err)
		if answer.Info == nil {
			return state{}
		}
		return state{answer.Token, answer.Info.Torn}
	}
	in, out, finish := agentOn(t, cl, defaultSilence)
	require.Equal(t, state{"made", true}, do(in, out, opCreate, control{Bytes: 4096, Attr: encodeAttr(Attr{}), Replicas: 1, RegionBytes: 1 << 20, Token: "made", Torn: true}))
	long := control{Token: strings.Repeat("t", len(token{})+1)}.encode()
	require.ErrorIs(t, decodeError(request(t, in, out, opOwn, long).body), client.ErrArgument)
	require.NoError(t, in.Close())
	require.NoError(t, finish())
	for _, s := range []state{{"next", true}, {"other", false}, {"made", true}} {
		i, err := Stat(ctx, cl, "p")
		require.NoError(t, err)
		in, out, finish = agentOn(t, cl, defaultSilence)
		before := do(in, out, opOpen, control{Bytes: 4096, Keep: true})
		require.Equal(t, i.Torn, before.torn)
		do(in, out, opClose, control{})
		require.Equal(t, before, do(in, out, opOpen, control{Bytes: 4096, Keep: true}), "an owner that has not written")
		do(in, out, opOwn, control{Token: s.token, Torn: s.torn})
		require.NoError(t, in.Close())
		require.NoError(t, finish())
		in, out, finish = agentOn(t, cl, defaultSilence)
		require.Equal(t, s, do(in, out, opOpen, control{Bytes: 4096, Keep: true}))
		require.NoError(t, in.Close())
		require.NoError(t, finish())
	}

	// While an operation on a range is running, the pool can be torn, because another one has failed.
	p, err := open(ctx, cl, "p", nil, 4096, nil, true)
	require.NoError(t, err)
	a := &agent{c: cl, pool: p}
	a.mu.RLock()
	_, err = a.control(ctx, frame{kind: opOwn, body: control{Token: "beside", Torn: true}.encode()})
	a.mu.RUnlock()
	require.NoError(t, err)
	require.Equal(t, "beside", p.owner())
	require.NoError(t, p.Close(ctx))
}

// TestProgramThatIsSilent: a program whose host is lost, or that is stopped, does not keep its pool. What is left of its requests changes nothing.
func TestProgramThatIsSilent(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 1})
	cl := c.Connect(client.Config{})
	create := control{Name: "p", Bytes: 4096, Attr: encodeAttr(Attr{}), Replicas: 1, RegionBytes: 1 << 20}.encode()
	for silence := 50 * time.Millisecond; ; silence *= 2 {
		in, out, finish := agentOn(t, cl, silence)
		_, _ = in.Write(append(appendFrame(nil, opCreate, 1, len(create)), create...))
		go io.Copy(io.Discard, out)
		require.ErrorContains(t, finish(), "was silent for")
		_, err := in.Write(append(appendFrame(nil, opPersist, 2, 9), "\x00\x00\x00\x00\x00\x00\x00\x00x"...))
		require.ErrorIs(t, err, io.ErrClosedPipe)
		i, err := Stat(t.Context(), cl, "p")
		if err == nil {
			require.Zero(t, i.Owner)
			return
		}
		require.ErrorIs(t, err, client.ErrNoName, "the silence was over before the pool was there")
	}
}

// TestAgentEndsBehindItsOperations: a Persist that is running when the stream ends is in the pool before another program can open it, and the pool is Dirty then.
func TestAgentEndsBehindItsOperations(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{Nodes: 1})
	other := c.Connect(client.Config{})
	const size = 16 << 20
	create := control{Name: "p", Bytes: size, Attr: encodeAttr(Attr{}), Replicas: 1, RegionBytes: 16 << 20}.encode()
	for round := range uint64(8) {
		in, out, finish := agentOn(t, c.Connect(client.Config{Transport: client.TransportTCP}), defaultSilence)
		kind, body := opOpen, control{Name: "p", Bytes: size}.encode()
		if round == 0 {
			kind, body = opCreate, create
		}
		require.Equal(t, frameDone, request(t, in, out, kind, body).kind)
		go io.Copy(io.Discard, out)
		b := make([]byte, maxData)
		for i := 0; i < len(b); i += 8 {
			binary.LittleEndian.PutUint64(b[i:], round+1)
		}
		for i := range uint64(size / maxData) {
			_, err := in.Write(append(appendWords(appendFrame(nil, opPersist, i, 8+maxData), i*maxData), b...))
			require.NoError(t, err)
		}
		require.NoError(t, in.Close())
		back := make([]byte, size)
		var p *Pool
		require.Eventually(t, func() (is bool) {
			var err error
			p, err = Open(t.Context(), other, "p", back, nil)
			return err == nil
		}, time.Minute, time.Microsecond)
		require.True(t, p.Dirty())
		require.NoError(t, p.Read(back, 0))
		again := make([]byte, size)
		require.NoError(t, finish())
		require.NoError(t, p.Read(again, 0))
		require.Equal(t, back, again, "bytes have arrived behind Open")
		_, err := p.Restore(t.Context(), nil)
		require.NoError(t, err)
		require.False(t, p.Dirty())
		require.NoError(t, p.Close(t.Context()))
	}
}
