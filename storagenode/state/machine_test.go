package state

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

var cluster = [16]byte{0xc1}

// TestTranscripts replays conversations of controllers with an agent. The I/O of a
// command ends at once unless it says "hold".
func TestTranscripts(t *testing.T) {
	datadriven.Walk(t, "testdata/transcripts", func(t *testing.T, path string) {
		s := New(Limits{CapacityBytes: 64 << 20, Persistent: true}, Kept{}, nil)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			var out strings.Builder
			for line := range strings.Lines(d.Input) {
				line = strings.TrimSpace(line)
				fmt.Fprintf(&out, "%s\n", line)
				if line == "restart" {
					s = restart(t, s)
					continue
				}
				e, hold := parse(t, line)
				actions, err := s.Step(e)
				if err != nil {
					var refused *Error
					require.ErrorAs(t, err, &refused)
					fmt.Fprintf(&out, "  refused: %v\n", err)
					continue
				}
				region := uint32(0)
				for _, a := range actions {
					fmt.Fprintf(&out, "  %v\n", a)
					region = max(region, a.Region)
				}
				if region != 0 && !hold {
					s.Step(Ended{Region: region})
				}
			}
			fmt.Fprintf(&out, "term %d, %d bytes", s.Term, s.HostedSize)
			for _, r := range s.Regions {
				fmt.Fprintf(&out, "; region %d %v, epoch %d, closed %d", r.Number, r.Phase, r.Epoch, r.Closed)
			}
			return out.String() + "\n"
		})
	})
}

// restart is what a node with files knows in its next incarnation.
func restart(t require.TestingT, s *State) *State {
	kept, err := DecodeKept(s.Kept.Encode())
	require.NoError(t, err)
	var found []Region
	for _, r := range s.Regions {
		found = append(found, Region{Number: r.Number, UUID: r.UUID, Cluster: r.Cluster, Bytes: r.Bytes, Epoch: r.Epoch})
	}
	return New(s.Limits, kept, found)
}

func parse(t *testing.T, line string) (e Event, hold bool) {
	words := strings.Fields(line)
	args := map[string]string{}
	for _, w := range words[1:] {
		k, v, _ := strings.Cut(w, "=")
		args[k] = v
	}
	num := func(k string) uint64 {
		n, err := strconv.ParseUint(args[k], 10, 64)
		require.True(t, err == nil || args[k] == "", "%s: %v", line, err)
		return n
	}
	list := func(k string) (out []uint64) {
		for _, w := range strings.Split(args[k], ",") {
			if w != "" {
				n, err := strconv.ParseUint(w, 10, 64)
				require.NoError(t, err)
				out = append(out, n)
			}
		}
		return out
	}
	has := func(k string) bool { _, ok := args[k]; return ok }
	region, term, epoch := uint32(num("region")), num("term"), num("epoch")
	hold = has("hold")
	switch words[0] {
	case "register":
		c := cluster
		if has("foreign") {
			c = [16]byte{0xee}
		}
		return Registered{Term: term, Cluster: c, Node: uint32(num("node")), Next: num("next"), Live: list("live"), Fenced: list("fenced")}, hold
	case "host":
		h := Host{Term: term, Region: region, UUID: [16]byte{byte(region)}, Cluster: cluster, Bytes: 16 << 20,
			Zero: has("zero"), MustExist: has("must-exist"), Epoch: epoch, Persistent: has("persistent")}
		if has("uuid") {
			h.UUID = [16]byte{byte(num("uuid"))}
		}
		if has("mib") {
			h.Bytes = num("mib") << 20
		}
		if has("foreign") {
			h.Cluster = [16]byte{0xee}
		}
		return h, hold
	case "open":
		return Open{Term: term, Region: region, Epoch: epoch}, hold
	case "close":
		return Close{Term: term, Region: region, Epoch: epoch}, hold
	case "drop":
		return Drop{Term: term, Region: region, Epoch: epoch}, hold
	case "fence":
		return Fence{Term: term, Serials: list("serials")}, hold
	case "work":
		return Work{Term: term, Region: region, Epoch: epoch, Kind: kindOf(args["kind"]), ID: num("id")}, hold
	case "work-ended":
		return WorkEnded{Region: region, Kind: kindOf(args["kind"]), Run: num("run"), Failed: has("failed")}, hold
	case "ended":
		return Ended{Region: region, Failed: has("failed")}, hold
	}
	t.Fatalf("unknown line %q", line)
	return nil, false
}

func kindOf(s string) Kind {
	for k := Reconcile; k < kinds; k++ {
		if k.String() == s {
			return k
		}
	}
	return 0
}

// TestHazard14_OnlyRisingTermsAndEpochs throws commands of several controllers at a
// node in any order, late and twice, with failing I/O and restarts in between.
func TestHazard14_OnlyRisingTermsAndEpochs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := New(Limits{CapacityBytes: 1 << 30}, Kept{}, nil)
		served := map[uint32]uint64{} // newest epoch of each region that was ever served
		cut := map[uint32]uint64{}    // newest epoch certainly closed
		ended := map[uint64]bool{}    // serials fenced
		highest := uint64(0)          // term obeyed
		open := map[uint32]uint64{}   // epoch now served, in this incarnation
		number := rapid.Uint32Range(1, 3)
		// Integer ranges prefer small numbers; samples do not.
		often := rapid.SampledFrom([]int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9})
		term, epoch := rapid.SampledFrom([]uint64{1, 2, 2, 2, 2, 2, 3}), rapid.SampledFrom([]uint64{0, 1, 2, 3, 4, 5, 6, 7, 8})
		serials := rapid.SliceOfN(rapid.Uint64Range(1, 30), 0, 5)
		register := func() {
			r := Registered{Term: term.Draw(t, "term"), Cluster: cluster, Node: 1, Next: rapid.Uint64Range(1, 20).Draw(t, "next"),
				Live: serials.Draw(t, "live"), Fenced: serials.Draw(t, "fenced")}
			before := s.Serials.Next
			if _, err := s.Step(r); err != nil {
				return
			}
			highest = max(highest, r.Term)
			for _, f := range r.Fenced {
				ended[f] = true
			}
			if r.Next >= before {
				for serial := range r.Next {
					found := false
					for _, l := range r.Live {
						found = found || l == serial
					}
					if !found {
						ended[serial] = true
					}
				}
			}
		}
		register()
		for range rapid.IntRange(20, 60).Draw(t, "steps") {
			if often.Draw(t, "restart") == 0 {
				s = restart(t, s)
				clear(open)
				for n, ep := range served {
					cut[n] = max(cut[n], ep) // another incarnation
				}
				register()
				continue
			}
			var e Event
			r, tm, ep := number.Draw(t, "region"), term.Draw(t, "term"), epoch.Draw(t, "epoch")
			switch rapid.SampledFrom([]int{0, 1, 2, 3, 4, 5}).Draw(t, "kind") {
			case 0:
				e = Host{Term: tm, Region: r, UUID: [16]byte{byte(r)}, Cluster: cluster, Bytes: 16 << 20, Zero: rapid.Bool().Draw(t, "zero"), Epoch: ep}
			case 1, 2:
				e = Open{Term: tm, Region: r, Epoch: ep}
			case 3:
				e = Close{Term: tm, Region: r, Epoch: ep}
			case 4:
				e = Drop{Term: tm, Region: r, Epoch: ep}
			case 5:
				f := Fence{Term: tm, Serials: serials.Draw(t, "serials")}
				if _, err := s.Step(f); err == nil {
					require.GreaterOrEqual(t, tm, highest)
					highest = max(highest, tm)
					for _, serial := range f.Serials {
						ended[serial] = true
					}
				}
				continue
			}
			actions, err := s.Step(e)
			if err != nil {
				var refused *Error
				require.True(t, errors.As(err, &refused))
				continue
			}
			require.GreaterOrEqual(t, tm, highest, "a deposed controller was obeyed")
			if tm > highest {
				require.Equal(t, Save, actions[0].Do, "a term is kept before it is acted upon")
			}
			highest = max(highest, tm)
			if len(actions) == 0 || actions[len(actions)-1].Region == 0 {
				continue
			}
			// The shell: carries out a prefix of the actions.
			failed, certain := false, false
			for _, a := range actions {
				if failed = often.Draw(t, "fail") == 0; failed && a.Do != Save {
					break
				}
				failed = false
				switch a.Do {
				case Cut:
					delete(open, r)
					cut[r] = max(cut[r], a.Epoch)
					certain = true
				case Serve:
					require.True(t, certain, "served before older keys are dead")
					require.Greater(t, a.Epoch, cut[r], "a closed epoch is served again")
					require.GreaterOrEqual(t, a.Epoch, served[r], "an epoch falls")
					served[r], open[r] = a.Epoch, a.Epoch
				case Zero, Free:
					require.True(t, certain, "memory that may be open is destroyed")
					require.GreaterOrEqual(t, e.(interface{ destroys() uint64 }).destroys(), served[r],
						"memory of a later epoch is destroyed")
					if a.Do == Free {
						// Whoever makes it again makes another incarnation of it.
						delete(served, r)
						delete(cut, r)
					}
				}
			}
			s.Step(Ended{Region: r, Failed: failed})
			for _, g := range s.Regions {
				if g.Phase == Opened {
					require.Equal(t, g.Epoch, open[g.Number], "region %d is not served as the machine says", g.Number)
				}
			}
		}
		require.Equal(t, highest, s.Term)
		for serial := range ended {
			require.True(t, s.Serials.Refuses(serial), "ended serial %d would be admitted: %+v", serial, s.Serials)
		}
		require.True(t, s.Serials.valid(), "%+v", s.Serials)
		sum := uint64(0)
		for _, g := range s.Regions {
			sum += g.Bytes
			require.LessOrEqual(t, g.Closed, g.Epoch)
		}
		require.Equal(t, sum, s.HostedSize)
	})
}

func (h Host) destroys() uint64 { return h.Epoch }
func (d Drop) destroys() uint64 { return d.Epoch }

func FuzzDecodeKept(f *testing.F) {
	k := Kept{Cluster: cluster, Term: 3, Serials: Serials{Next: 9, Live: []uint64{2, 5}, Ended: []uint64{11}}}
	f.Add(k.Encode())
	f.Add([]byte("QUARRYND"))
	f.Fuzz(func(t *testing.T, b []byte) {
		k, err := DecodeKept(b)
		if err == nil {
			require.Equal(t, b, k.Encode())
		}
	})
}

func TestKeptNoticesEveryFlippedBit(t *testing.T) {
	k := Kept{Cluster: cluster, Term: 3, Serials: Serials{Next: 9, Live: []uint64{2, 5}, Ended: []uint64{11}}}
	good := k.Encode()
	back, err := DecodeKept(good)
	require.NoError(t, err)
	require.Equal(t, k, back)
	for i := range len(good) * 8 {
		bad := append([]byte(nil), good...)
		bad[i/8] ^= 1 << (i % 8)
		_, err := DecodeKept(bad)
		require.ErrorIs(t, err, ErrNotKept, "bit %d", i)
	}
	for n := range good {
		_, err := DecodeKept(good[:n])
		require.ErrorIs(t, err, ErrNotKept, "cut to %d bytes", n)
	}
}
