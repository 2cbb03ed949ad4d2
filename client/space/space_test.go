package space_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/verify/testcluster"
)

const mib = 1 << 20

// TestSameAddressEverywhere: two clients over different transports, borders of regions, words, growth, and the end.
func TestSameAddressEverywhere(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 2})
	a := c.Connect(client.Config{Transport: client.TransportTCP})
	b := c.Connect(client.Config{Transport: client.TransportSHM})
	s, err := space.Create(ctx, a, "matrix", 3*mib, space.Options{RegionBytes: mib, Replicas: 2})
	require.NoError(t, err)
	require.EqualValues(t, 0x1000_0000_0000, s.Base())
	require.EqualValues(t, 3*mib, s.Bytes())
	o, err := space.Open(ctx, b, "matrix")
	require.NoError(t, err)

	// 2.5 MiB over both borders; the last part of it is one round.
	data := bytes.Repeat([]byte("abcdefghijk"), 5*mib/2/11)
	at := int64(s.Base()) + 100_001
	n, err := s.WriteAt(data, at)
	require.NoError(t, err)
	require.Equal(t, len(data), n)
	back := make([]byte, len(data))
	_, err = o.ReadAt(back, at)
	require.NoError(t, err)
	require.Equal(t, data, back)
	all, err := io.ReadAll(io.NewSectionReader(o, int64(o.Base()), int64(o.Bytes())))
	require.NoError(t, err)
	require.Len(t, all, 3*mib)
	n, err = o.ReadAt(make([]byte, 100), int64(o.Base()+o.Bytes()-10))
	require.Equal(t, 10, n)
	require.ErrorIs(t, err, io.EOF)

	var wg sync.WaitGroup
	word := s.Base() + 2*mib
	for i, x := range []*space.Space{s, o, s, o} {
		wg.Go(func() {
			for range 50 {
				if i < 2 {
					_, err := x.Add64(ctx, word, 1)
					require.NoError(t, err)
					continue
				}
				for {
					old, err := x.Load64(ctx, word)
					require.NoError(t, err)
					_, swapped, err := x.CAS64(ctx, word, old, old+1)
					require.NoError(t, err)
					if swapped {
						break
					}
				}
			}
		})
	}
	require.NoError(t, s.Store64(ctx, word+8, 1<<63))
	wg.Wait()
	v, err := o.Load64(ctx, word)
	require.NoError(t, err)
	first := uint64(0)
	for i := range 8 {
		first |= uint64(data[2*mib-100_001+i]) << (8 * i)
	}
	require.EqualValues(t, 200, v-first, "4 clients add to what the bytes were")
	require.NoError(t, s.Flush(ctx, s.Base(), s.Bytes()))

	// The other client learns of growth when it comes to the new addresses.
	require.NoError(t, s.Grow(ctx, 1))
	require.EqualValues(t, 4*mib, s.Bytes())
	_, err = o.Write(ctx, []byte("grown"), s.Base()+3*mib)
	require.NoError(t, err)
	p, err := o.Resolve(ctx, s.Base()+3*mib+5)
	require.NoError(t, err)
	require.EqualValues(t, 5, p.Offset)
	require.Equal(t, client.TransportSHM, p.Provider)
	require.NotEmpty(t, p.Node)
	list, err := space.List(ctx, b)
	require.NoError(t, err)
	require.Equal(t, []space.Info{{Name: "matrix", Base: s.Base(), Bytes: 4 * mib, RegionBytes: mib, Regions: 4, Replicas: 2}}, list)

	// No object is allocated there, and the space goes with what it holds.
	ref, err := a.Alloc(ctx, []byte("object"), client.AllocOptions{})
	require.NoError(t, err)
	for _, g := range c.Table().Regions {
		require.False(t, g.Id == ref.Addr.Region() && g.Space != nil)
	}
	require.NoError(t, space.Delete(ctx, a, "matrix"))
	// Nodes give the memory back behind the answer.
	require.Eventually(t, func() bool { _, err := o.Load64(ctx, word); return err != nil }, 3*time.Minute, 10*time.Millisecond)
	require.ErrorIs(t, space.Delete(ctx, a, "matrix"), client.ErrNoName)
	_, err = space.Open(ctx, b, "matrix")
	require.ErrorIs(t, err, client.ErrNoName)
}

// TestRefused: bad input changes nothing.
func TestRefused(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Capacity: 64 * mib})
	cl := c.Connect(client.Config{})
	s, err := space.Create(ctx, cl, "s", mib, space.Options{})
	require.NoError(t, err)
	for want, o := range map[error]space.Options{
		client.ErrNoSpace:  {Base: s.Base(), RegionBytes: mib},
		client.ErrArgument: {RegionBytes: mib + 1},
	} {
		_, err := space.Create(ctx, cl, "t", mib, o)
		require.ErrorIs(t, err, want)
	}
	_, err = space.Create(ctx, cl, "t", mib, space.Options{Base: 4096, RegionBytes: mib})
	require.ErrorIs(t, err, client.ErrArgument)
	_, err = space.Create(ctx, cl, "t", 0, space.Options{})
	require.ErrorIs(t, err, client.ErrArgument)
	_, err = space.Create(ctx, cl, "t", 1<<30, space.Options{})
	require.ErrorIs(t, err, client.ErrNoSpace)
	_, err = space.Create(ctx, cl, "t", 200*mib, space.Options{RegionBytes: mib})
	require.ErrorIs(t, err, client.ErrNoSpace)
	_, err = space.Open(ctx, cl, "t")
	require.ErrorIs(t, err, client.ErrNoName, "a space that could not be made whole is not left in part")
	_, err = space.Create(ctx, cl, "s", mib, space.Options{})
	require.ErrorIs(t, err, client.ErrNameExists)
	require.ErrorIs(t, s.Grow(ctx, 1<<30), client.ErrNoSpace)
	require.ErrorIs(t, s.Grow(ctx, 0), client.ErrArgument)

	for _, va := range []uint64{0, s.Base() - 1, s.Base() + s.Bytes() - 7, s.Base() + s.Bytes(), 1<<64 - 4} {
		_, err := s.Write(ctx, make([]byte, 8), va)
		require.ErrorIs(t, err, space.ErrAddress, "%#x", va)
		_, err = s.Read(ctx, make([]byte, 8), va)
		require.ErrorIs(t, err, space.ErrAddress, "%#x", va)
		require.ErrorIs(t, s.Flush(ctx, va, 8), space.ErrAddress, "%#x", va)
	}
	for _, va := range []uint64{s.Base() + 1, s.Base() + 4, s.Base() + s.Bytes(), s.Base() - 8} {
		_, err := s.Add64(ctx, va, 1)
		require.ErrorIs(t, err, client.ErrArgument, "%#x", va)
		_, err = s.Load64(ctx, va)
		require.ErrorIs(t, err, client.ErrArgument, "%#x", va)
		_, _, err = s.CAS64(ctx, va, 0, 1)
		require.ErrorIs(t, err, client.ErrArgument, "%#x", va)
		require.ErrorIs(t, s.Store64(ctx, va, 1), client.ErrArgument, "%#x", va)
	}
	require.ErrorIs(t, cl.ReadRaw(ctx, make([]client.RawPiece, client.MaxRawPieces+1)), client.ErrArgument)
	p, err := s.Resolve(ctx, s.Base())
	require.NoError(t, err)
	require.ErrorIs(t, cl.WriteRaw(ctx, []client.RawPiece{{Region: p.Region, Buf: make([]byte, client.MaxRawBytes)}, {Region: p.Region, Buf: make([]byte, 1)}}), client.ErrArgument)
	for _, off := range []uint64{mib, 1 << 40} {
		err := cl.ReadRaw(ctx, []client.RawPiece{{Region: p.Region, Off: off, Buf: make([]byte, 4)}})
		require.ErrorIs(t, err, client.ErrArgument)
		require.ErrorContains(t, err, fmt.Sprintf("%#x of its data", off))
	}
	require.ErrorIs(t, cl.ReadRaw(ctx, []client.RawPiece{{Region: p.Region, Off: 1<<64 - 2, Buf: make([]byte, 4)}}), client.ErrArgument)
	ro := c.Connect(client.Config{ReadOnly: true})
	r, err := space.Open(ctx, ro, "s")
	require.NoError(t, err)
	_, err = r.Load64(ctx, s.Base())
	require.NoError(t, err)
	require.ErrorIs(t, r.Store64(ctx, s.Base(), 1), client.ErrReadOnly)
	require.ErrorIs(t, space.Delete(ctx, ro, "s"), client.ErrReadOnly)
}

// TestContextsThatHaveEnded: no call does anything then.
func TestContextsThatHaveEnded(t *testing.T) {
	c := testcluster.New(t, testcluster.Options{})
	cl := c.Connect(client.Config{})
	s, err := space.Create(t.Context(), cl, "s", mib, space.Options{})
	require.NoError(t, err)
	testcluster.ContextCalls(t, []any{s}, map[string]func(context.Context) error{
		"Create": func(ctx context.Context) error {
			_, err := space.Create(ctx, cl, "another", mib, space.Options{})
			return err
		},
		"Open":   func(ctx context.Context) error { _, err := space.Open(ctx, cl, "s"); return err },
		"List":   func(ctx context.Context) error { _, err := space.List(ctx, cl); return err },
		"Delete": func(ctx context.Context) error { return space.Delete(ctx, cl, "s") },
	}, []byte("changed"), s.Base())
	v, err := s.Load64(t.Context(), s.Base())
	require.NoError(t, err)
	require.Zero(t, v)
}

// TestFailover: a node is lost under writers, and its replica rebuilt beside them; then another one. What was acknowledged is there, and a
// word counts what was counted.
func TestFailover(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{Nodes: 3, ReplaceAfter: 1})
	cl := c.Connect(client.Config{})
	s, err := space.Create(ctx, cl, "s", 4*mib, space.Options{RegionBytes: 2 * mib, Replicas: 2})
	require.NoError(t, err)
	const writers, slots = 2, 64
	var stop atomic.Bool
	var done, unknown atomic.Uint64
	var acknowledged [writers][slots]byte
	var wg sync.WaitGroup
	word := s.Base() + 3*mib
	for w := range writers {
		wg.Go(func() {
			for i := 0; !stop.Load(); i++ {
				slot, v := i%slots, byte(1+i/slots)
				// Pieces of 3000 bytes, of which some lie over the border.
				at := s.Base() + 2*mib - 3000*writers*slots/2 + uint64(3000*(w*slots+slot))
				_, err := s.Write(ctx, bytes.Repeat([]byte{v}, 3000), at)
				require.NoError(t, err)
				acknowledged[w][slot] = v
				switch _, err := s.Add64(ctx, word, 1); {
				case err == nil:
					done.Add(1)
				default:
					require.ErrorIs(t, err, client.ErrUnknown)
					unknown.Add(1)
				}
			}
		})
	}
	for range 2 {
		p, err := s.Resolve(ctx, word)
		require.NoError(t, err)
		for i, n := range c.Nodes {
			if c.NodeConfig(i).Name == p.Node {
				require.NoError(t, n.Close())
				c.RestartNode(i)
			}
		}
		before := done.Load()
		for done.Load() < before+writers*slots && !t.Failed() {
			_, err := s.Load64(ctx, word)
			require.NoError(t, err)
		}
		// Writes go on: the controllers have seen the loss. Before that the table still calls the replica in sync.
		c.WaitInSync(2)
	}
	stop.Store(true)
	wg.Wait()
	v, err := s.Load64(ctx, word)
	require.NoError(t, err)
	require.GreaterOrEqual(t, v, done.Load())
	require.LessOrEqual(t, v, done.Load()+unknown.Load())
	for w := range writers {
		for slot, v := range acknowledged[w] {
			got := make([]byte, 3000)
			_, err := s.Read(ctx, got, s.Base()+2*mib-3000*writers*slots/2+uint64(3000*(w*slots+slot)))
			require.NoError(t, err)
			require.Equal(t, bytes.Repeat([]byte{v}, 3000), got)
		}
	}
}

// TestAnotherSpaceOfTheName: a Space does not become another one that was made under its name, at the same addresses.
func TestAnotherSpaceOfTheName(t *testing.T) {
	ctx := t.Context()
	c := testcluster.New(t, testcluster.Options{}).Connect(client.Config{})
	old, err := space.Create(ctx, c, "s", mib, space.Options{})
	require.NoError(t, err)
	require.NoError(t, space.Delete(ctx, c, "s"))
	made, err := space.Create(ctx, c, "s", 2*mib, space.Options{Base: old.Base(), RegionBytes: mib})
	require.NoError(t, err)
	require.NotEqual(t, old.Identity(), made.Identity())
	id := old.Identity()
	for _, va := range []uint64{old.Base() + mib, old.Base()} { // behind its end it looks the space up again
		_, err = old.Write(ctx, []byte("stale"), va)
		require.Error(t, err)
		if va != old.Base() {
			require.ErrorIs(t, err, client.ErrNoName)
		}
	}
	require.Equal(t, id, old.Identity())
	got := make([]byte, 2*mib)
	_, err = made.Read(ctx, got, made.Base())
	require.NoError(t, err)
	require.Equal(t, make([]byte, 2*mib), got, "nothing is written into the other space")
	require.NoError(t, made.Grow(ctx, mib), "a space that has grown is the same one")
	_, err = made.Write(ctx, []byte("grown"), made.Base()+2*mib)
	require.NoError(t, err)
}
