package slab_test

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/payloadkey"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/slab"
	"github.com/quarrystore/quarry/verify/slabtest"
)

var keyA, keyB = payloadkey.Key{1}, payloadkey.Key{2}

// encrypted is a lane of a session with keys.
func encrypted(w *slabtest.World, session uint32, keys ...payloadkey.Key) *slabtest.Port {
	p := w.Lane(session)
	p.Lane.Encrypt(payloadkey.NewRing("shop", false, nil, keys...))
	return p
}

// vault is a world that a test looks into and changes.
type vault struct {
	*slabtest.World
	t    *testing.T
	keys *payloadkey.Ring // of p
	p    *slabtest.Port
}

// refused is how many payloads p has refused for a reason.
func (v *vault) refused(why payloadkey.Refusal) (n uint64) {
	v.keys.Refused(func(r payloadkey.Refusal, of uint64) {
		if r == why {
			n = of
		}
	})
	return n
}

// slabOf is the slab of an object and the seed of its images.
func (v *vault) slabOf(ref proto.Ref) (proto.Slab, uint64) {
	b, ok := v.Geometry.BlockOf(uint64(ref.Addr.Off()))
	require.True(v.t, ok)
	h := proto.Header(proto.Word(v.Nodes[0].Memory.Bytes(), int(v.Geometry.HeaderOff(b))))
	s := proto.Slab{Off: uint64(ref.Addr.Off()), Class: h.Class(), Kind: h.Kind()}
	return s, proto.Seed(proto.RegionSeed([16]byte{1}), s.Off, h.Generation())
}

// image is the active image of an object on a node, in the memory itself.
func (v *vault) image(node int, ref proto.Ref) []byte {
	s, _ := v.slabOf(ref)
	buf := v.Nodes[node].Memory.Bytes()[s.Off:][:s.Class.Bytes()]
	_, w := s.Words(buf)
	return s.Image(buf, w.Version())
}

// put makes an image with a right checksum the active one.
func (v *vault) put(ref proto.Ref, payload []byte, change func(h *proto.ImageHeader)) {
	_, seed := v.slabOf(ref)
	img := v.image(0, ref)
	h := proto.ParseImageHeader(img)
	h.Length = len(payload)
	if change != nil {
		change(&h)
	}
	copy(img[proto.ImageHeaderBytes:], payload)
	proto.EncodeImage(img, seed, h)
}

// payload is the payload of the active image as it lies in memory.
func (v *vault) payload(ref proto.Ref) []byte {
	img := v.image(0, ref)
	return bytes.Clone(img[proto.ImageHeaderBytes:][:proto.ParseImageHeader(img).Length])
}

func (v *vault) alloc(payload string, k proto.Kind) proto.Ref {
	ref, err := v.p.Alloc.Alloc([]byte(payload), alloc.Want{Kind: k, Replicas: len(v.Nodes), Tag: 7, Capacity: 100})
	require.NoError(v.t, err)
	return ref
}

func newVault(t *testing.T, replicas int) *vault {
	w := slabtest.New(t, replicas)
	v := &vault{w, t, payloadkey.NewRing("shop", false, nil, keyA), w.Lane(5)}
	v.p.Lane.Encrypt(v.keys)
	return v
}

// TestOnlyCiphertextIsStored: what a client writes in any way is nowhere in the memory of a node.
func TestOnlyCiphertextIsStored(t *testing.T) {
	v := newVault(t, 2)
	const canary = "canary: nobody reads this in memory"
	refs := []proto.Ref{v.alloc(canary, proto.Pair), v.alloc(canary, proto.Single), v.alloc("", proto.Pair)}
	_, err := v.p.Lane.Update(refs[0], func(old []byte, info *slab.Info) ([]byte, error) {
		require.Equal(t, canary, string(old))
		require.Equal(t, uint32(7), info.Tag)
		return append(old, " "+canary...), nil
	})
	require.NoError(t, err)
	errs := make([]error, 1)
	v.p.Lane.WriteMany(refs[2:], [][]byte{[]byte(canary)}, errs)
	require.NoError(t, errs[0])
	for _, n := range v.Nodes {
		require.False(t, bytes.Contains(n.Memory.Bytes(), []byte("canary")))
	}
	want := []string{canary + " " + canary, canary, canary}
	for i, ref := range refs {
		got, info, err := v.p.Lane.Read(ref, []byte("x"))
		require.NoError(t, err)
		require.Equal(t, "x"+want[i], string(got))
		require.Equal(t, uint32(7), info.Tag)
	}
	require.NoError(t, v.p.Lane.ReadMany(refs, func(i int, payload []byte, info slab.Info, err error) {
		require.NoError(t, err)
		require.Equal(t, want[i], string(payload))
	}))
}

// TestCiphertextIsBoundToItsPlace: whoever can write the memory, and computes right checksums, has
// nothing read that no holder of the key has written at that place and version.
func TestCiphertextIsBoundToItsPlace(t *testing.T) {
	v := newVault(t, 1)
	a, b := v.alloc("account a: 100", proto.Pair), v.alloc("account b: 900", proto.Pair)
	single, index := v.alloc("written once", proto.Single), proto.Ref{}
	index, err := v.p.Alloc.Alloc(make([]byte, 32), alloc.Want{Replicas: 1, Tag: proto.TagIndex})
	require.NoError(t, err)
	older := v.payload(a)
	for range 2 { // the same place and parity
		_, err = v.p.Lane.Update(a, func([]byte, *slab.Info) ([]byte, error) { return []byte("account a: 000"), nil })
		require.NoError(t, err)
	}
	flip := func(ref proto.Ref, at int) []byte {
		p := v.payload(ref)
		p[(at+len(p))%len(p)] ^= 1
		return p
	}
	for _, c := range []struct {
		what    string
		ref     proto.Ref
		payload []byte
		change  func(*proto.ImageHeader)
		want    error
	}{
		{"a bit of the ciphertext", a, flip(a, proto.EncryptedLead), nil, slab.ErrNotAuthentic},
		{"a bit of the nonce", a, flip(a, 12), nil, slab.ErrNotAuthentic},
		{"a bit of the authentication tag", a, flip(a, -1), nil, slab.ErrNotAuthentic},
		{"a bit of the key's id", a, flip(a, 0), nil, slab.ErrKey},
		{"another format", a, flip(a, 7), nil, slab.ErrNotAuthentic},
		{"said to be a chunk", a, flip(a, 6), nil, slab.ErrNotAuthentic},
		{"another object's", a, v.payload(b), nil, slab.ErrNotAuthentic},
		{"an older one", a, older, nil, slab.ErrNotAuthentic},
		{"another tag", a, v.payload(a), func(h *proto.ImageHeader) { h.Tag ^= 1 }, slab.ErrNotAuthentic},
		{"another writer", a, v.payload(a), func(h *proto.ImageHeader) { h.Writer++ }, slab.ErrNotAuthentic},
		{"a clear one", a, []byte("account a: 999"), func(h *proto.ImageHeader) { h.Tag = 7 }, slab.ErrNotEncrypted},
		{"no envelope", a, []byte("short"), nil, slab.ErrNotAuthentic},
		{"written once", single, flip(single, proto.EncryptedLead), nil, slab.ErrNotAuthentic},
		{"an index", index, flip(index, proto.EncryptedLead+20), nil, slab.ErrNotAuthentic},
	} {
		t.Run(c.what, func(t *testing.T) {
			img := v.image(0, c.ref)
			was := bytes.Clone(img)
			v.put(c.ref, c.payload, c.change)
			why := map[error]payloadkey.Refusal{slab.ErrKey: payloadkey.NoKey, slab.ErrNotEncrypted: payloadkey.NotEncrypted, slab.ErrNotAuthentic: payloadkey.NotAuthentic}[c.want]
			before := v.refused(why)
			_, _, err := v.p.Lane.Read(c.ref, nil)
			require.ErrorIs(t, err, c.want)
			require.Equal(t, before+1, v.refused(why), "it is counted")
			require.NotErrorIs(t, err, slab.ErrCorrupt)
			require.NoError(t, v.p.Lane.ReadMany([]proto.Ref{c.ref}, func(_ int, payload []byte, _ slab.Info, err error) {
				require.ErrorIs(t, err, c.want)
				require.Empty(t, payload)
			}))
			if c.ref == a {
				_, err = v.p.Lane.Update(c.ref, func([]byte, *slab.Info) ([]byte, error) {
					t.Error("the callback sees it")
					return nil, nil
				})
				require.ErrorIs(t, err, c.want)
			}
			copy(img, was)
			_, _, err = v.p.Lane.Read(c.ref, nil)
			require.NoError(t, err, "nothing was changed")
		})
	}
}

// TestKeysThatAreMissing: a session without the key gets an error that says which, and changes nothing.
func TestKeysThatAreMissing(t *testing.T) {
	v := newVault(t, 1)
	ref := v.alloc("secret", proto.Pair)
	index, err := v.p.Alloc.Alloc(make([]byte, 32), alloc.Want{Replicas: 1, Tag: proto.TagIndex})
	require.NoError(t, err)
	missed := 0
	other := v.Lane(6)
	other.Lane.Encrypt(payloadkey.NewRing("shop", true, func() { missed++ }, keyB))
	for _, p := range []*slabtest.Port{v.Lane(7), other} {
		refused := func(err error) {
			t.Helper()
			require.ErrorIs(t, err, slab.ErrKey)
			require.NotErrorIs(t, err, slab.ErrCorrupt)
			require.ErrorContains(t, err, payloadkey.IDText(keyA.ID()))
			require.ErrorContains(t, err, "--key-file")
		}
		_, _, err := p.Lane.Read(ref, nil)
		refused(err)
		_, err = p.Lane.Update(ref, func([]byte, *slab.Info) ([]byte, error) { return nil, nil })
		refused(err)
		_, err = p.Lane.Overwrite(ref, func([]byte, *slab.Info) ([]byte, error) { return nil, nil })
		refused(err)
		errs := make([]error, 1)
		p.Lane.WriteMany([]proto.Ref{ref}, [][]byte{nil}, errs)
		refused(errs[0])
		require.NoError(t, p.Lane.ReadMany([]proto.Ref{ref}, func(_ int, b []byte, _ slab.Info, err error) { refused(err) }))
		require.Error(t, p.Lane.ReadChunks([]proto.Ref{ref}, make([]byte, 1000), 0, 100, 6))
		_, _, err = p.Alloc.Free(index)
		refused(err)
	}
	require.Positive(t, missed)
	_, _, err = other.Lane.Read(ref, nil)
	require.ErrorContains(t, err, `tenant "shop" has key `+payloadkey.IDText(keyB.ID()))
	got, _, err := v.p.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.Equal(t, "secret", string(got))
	_, _, err = v.Lane(8).Alloc.Free(ref)
	require.NoError(t, err, "what is no index is freed without a key")
}

// TestKeysRotate: sessions that encrypt with different keys, and have both, read and change what the other writes.
func TestKeysRotate(t *testing.T) {
	w := slabtest.New(t, 2)
	before, after := encrypted(w, 5, keyA, keyB), encrypted(w, 6, keyB, keyA)
	ref, err := before.Alloc.Alloc([]byte{0}, alloc.Want{Replicas: 2})
	require.NoError(t, err)
	for i := range 6 {
		p := []*slabtest.Port{before, after}[i%2]
		_, err := p.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) { return []byte{old[0] + 1}, nil })
		require.NoError(t, err)
	}
	got, _, err := encrypted(w, 7, keyB).Lane.Read(ref, nil)
	require.NoError(t, err, "the last writer's key is enough")
	require.Equal(t, []byte{6}, got)
}

// TestClearObjectsOfBefore: they are read where that is allowed, and encrypted by the next change.
func TestClearObjectsOfBefore(t *testing.T) {
	v := newVault(t, 1)
	old := v.Lane(6)
	ref, err := old.Alloc.Alloc([]byte("from before"), alloc.Want{Replicas: 1, Capacity: 200})
	require.NoError(t, err)
	full, err := old.Alloc.Alloc(make([]byte, 88), alloc.Want{Replicas: 1})
	require.NoError(t, err)
	_, _, err = v.p.Lane.Read(ref, nil)
	require.ErrorIs(t, err, slab.ErrNotEncrypted)
	require.ErrorContains(t, err, "--allow-clear")

	both := v.Lane(7)
	both.Lane.Encrypt(payloadkey.NewRing("shop", true, nil, keyA))
	got, _, err := both.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.Equal(t, "from before", string(got))
	_, err = both.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) { return append(old, " and now"...), nil })
	require.NoError(t, err)
	got, _, err = v.p.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.Equal(t, "from before and now", string(got))
	_, err = both.Lane.Update(full, func(old []byte, _ *slab.Info) ([]byte, error) { return old, nil })
	require.ErrorIs(t, err, slab.ErrTooLarge)
	require.ErrorContains(t, err, "room for 40")
	tiny, err := old.Alloc.Alloc(make([]byte, 8), alloc.Want{Replicas: 1})
	require.NoError(t, err)
	_, err = both.Lane.Update(tiny, func(old []byte, _ *slab.Info) ([]byte, error) { return nil, nil })
	require.ErrorIs(t, err, slab.ErrTooLarge)
	require.ErrorContains(t, err, "encryption adds")
}

// TestRepairWithoutKeys: ciphertext is repaired by the bytes of another replica, at its version.
func TestRepairWithoutKeys(t *testing.T) {
	v := newVault(t, 3)
	mender := v.Lane(6)
	for _, kind := range []proto.Kind{proto.Pair, proto.Single} {
		for node := range v.Nodes {
			t.Run(fmt.Sprint(kind, node), func(t *testing.T) {
				ref := v.alloc("kept", kind)
				v.image(node, ref)[proto.ImageHeaderBytes+40] ^= 1
				require.NoError(t, mender.Lane.RepairAll(ref))
				for i := range v.Nodes {
					require.Equal(t, v.image(0, ref), v.image(i, ref))
				}
				got, info, err := v.p.Lane.Read(ref, nil)
				require.NoError(t, err)
				require.Equal(t, "kept", string(got))
				require.Equal(t, uint64(1), info.Version)
			})
		}
	}
	ref := v.alloc("repaired by the reader", proto.Pair)
	v.image(0, ref)[proto.ImageHeaderBytes+40] ^= 1
	got, _, err := v.p.Lane.Read(ref, nil)
	require.NoError(t, err)
	require.Equal(t, "repaired by the reader", string(got))
}

// TestReadOnlySessionsReadBackups: a session that may not repair decrypts the image of another replica, and
// changes nothing. Without the key it has an error, and no ciphertext.
func TestReadOnlySessionsReadBackups(t *testing.T) {
	v := newVault(t, 2)
	ref := v.alloc("from the backup", proto.Pair)
	img := v.image(0, ref)
	img[proto.ImageHeaderBytes+40] ^= 1
	was := bytes.Clone(img)
	for i, keys := range [][]payloadkey.Key{{keyA}, nil, {keyB}} {
		p := encrypted(v.World, uint32(10+i), keys...)
		reg, err := p.Region(1)
		require.NoError(t, err)
		reg.ReadOnly = true
		got, _, err := p.Lane.Read(ref, []byte("x"))
		if i == 0 {
			require.NoError(t, err)
			require.Equal(t, "xfrom the backup", string(got))
		} else {
			require.ErrorIs(t, err, slab.ErrKey)
			require.Equal(t, "x", string(got))
		}
		require.Equal(t, was, img)
	}
}

// TestDeadWritersImages: writers die with their images written and V not changed. What they left is
// not read, and the next one writes other bytes at the place under another nonce.
func TestDeadWritersImages(t *testing.T) {
	for _, replicas := range []int{1, 2, 3} {
		w := slabtest.New(t, replicas)
		v := &vault{World: w, t: t, p: encrypted(w, 5, keyA)}
		ref := v.alloc("before", proto.Pair)
		s, _ := v.slabOf(ref)
		nonces := map[string]bool{}
		for i := range uint32(6) {
			p := encrypted(w, 10+i, keyA)
			p.BeforeDo = func(_ int, r *rdma.Round) {
				for j := range r.Len() {
					c := r.At(j)
					for k, verb := range c.Verbs {
						if verb.Op == rdma.Write {
							nonces[string(verb.Buf[proto.ImageHeaderBytes+8:][:proto.NonceBytes])] = true
						}
						// It dies when the images are written and V of the primary is not changed.
						if c.To.Window == v.window(p) && verb.Op == rdma.CompareSwap && verb.Off == s.VOff() {
							if c.Verbs = c.Verbs[:k]; k > 0 {
								rdma.Do(r)
							}
							panic(slabtest.ErrDied)
						}
					}
				}
			}
			require.PanicsWithValue(t, slabtest.ErrDied, func() {
				_, _ = p.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) {
					require.Equal(t, "before", string(old))
					return fmt.Appendf(nil, "of writer %d", i), nil
				})
			})
			w.Fence(10 + i)
			got, _, err := v.p.Lane.Read(ref, nil)
			require.NoError(t, err)
			require.Equal(t, "before", string(got))
		}
		require.Len(t, nonces, 6, "R=%d: each image has a nonce of its own", replicas)
		_, err := v.p.Lane.Update(ref, func(old []byte, _ *slab.Info) ([]byte, error) { return append(old, '!'), nil })
		require.NoError(t, err)
		got, _, err := encrypted(w, 30, keyA).Lane.Read(ref, nil)
		require.NoError(t, err)
		require.Equal(t, "before!", string(got))
	}
}

// window is a port's window on the primary.
func (v *vault) window(p *slabtest.Port) rdma.Window {
	reg, err := p.Region(1)
	require.NoError(v.t, err)
	return reg.To[0].Window
}

// TestEncryptionCostsNoRound: rounds and verbs are those of clear objects, and nothing is allocated.
func TestEncryptionCostsNoRound(t *testing.T) {
	w := slabtest.NewSHM(t, 2)
	var counts []string
	for _, p := range []*slabtest.Port{w.Lane(1), encrypted(w, 2, keyA)} {
		ref, err := p.Alloc.Alloc(make([]byte, 100), alloc.Want{Replicas: 2, Capacity: 200})
		require.NoError(t, err)
		dst, payload := make([]byte, 0, 200), make([]byte, 150)
		replace := func([]byte, *slab.Info) ([]byte, error) { return payload, nil }
		many, payloads, errs := []proto.Ref{ref}, [][]byte{payload}, make([]error, 1)
		saw := func(int, []byte, slab.Info, error) {}
		for name, run := range map[string]func(){
			"read":      func() { _, _, err = p.Lane.Read(ref, dst) },
			"update":    func() { _, err = p.Lane.Update(ref, replace) },
			"overwrite": func() { _, err = p.Lane.Overwrite(ref, replace) },
			"readmany":  func() { err = p.Lane.ReadMany(many, saw) },
			"writemany": func() { p.Lane.WriteMany(many, payloads, errs); err = errs[0] },
		} {
			run()
			require.NoError(t, err, name)
			require.Zero(t, testing.AllocsPerRun(100, run), name)
		}
		rounds := p.Rounds()
		for range 3 {
			_, _, err = p.Lane.Read(ref, dst)
			require.NoError(t, err)
			_, err = p.Lane.Update(ref, replace)
			require.NoError(t, err)
		}
		counts = append(counts, fmt.Sprint(p.Rounds()-rounds))
	}
	require.Equal(t, counts[0], counts[1])
}
