package state

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A program that was replaced says so as late as it likes: also when one of its own
// id runs again. Found by the simulator: two scrubs replaced each other for ever.
func TestWork_TheEndOfAReplacedProgramEndsNoOther(t *testing.T) {
	s := New(Limits{CapacityBytes: 1 << 40}, Kept{}, nil)
	step := func(e Event) []Action {
		t.Helper()
		acts, err := s.Step(e)
		require.NoError(t, err)
		return acts
	}
	begun := func(acts []Action) uint64 {
		t.Helper()
		require.Len(t, acts, 1)
		require.Equal(t, Begin, acts[0].Do)
		return acts[0].Run
	}
	step(Registered{Term: 1, Cluster: [16]byte{1}, Node: 1, Next: 1})
	step(Host{Term: 1, Region: 1, UUID: [16]byte{2}, Cluster: [16]byte{1}, Bytes: 16 << 20})
	step(Ended{Region: 1})
	step(Open{Term: 1, Region: 1, Epoch: 3})
	step(Ended{Region: 1})

	scrub := func(id uint64) Work { return Work{Term: 1, Region: 1, Epoch: 3, Kind: Scrub, ID: id} }
	first := begun(step(scrub(7)))
	require.Empty(t, step(scrub(7)), "joined")
	step(WorkEnded{Region: 1, Kind: Scrub, Run: first, Failed: true})
	second := begun(step(scrub(7)))
	require.NotEqual(t, first, second)
	step(WorkEnded{Region: 1, Kind: Scrub, Run: first, Failed: true})
	require.Empty(t, step(scrub(7)), "the second still runs")

	third := begun(step(scrub(8)))
	step(WorkEnded{Region: 1, Kind: Scrub, Run: second, Failed: true})
	require.Empty(t, step(scrub(8)), "the third still runs")
	_, err := s.Step(scrub(7))
	require.Equal(t, Stale, err.(*Error).Code, "late: ids rise")

	step(WorkEnded{Region: 1, Kind: Scrub, Run: third})
	require.Empty(t, step(scrub(8)), "done")
	step(Close{Term: 1, Region: 1, Epoch: 3})
	step(Ended{Region: 1})
	step(Open{Term: 1, Region: 1, Epoch: 4})
	step(Ended{Region: 1})
	again := begun(step(Work{Term: 1, Region: 1, Epoch: 4, Kind: Scrub, ID: 7}))
	step(WorkEnded{Region: 1, Kind: Scrub, Run: third, Failed: true})
	require.Empty(t, step(Work{Term: 1, Region: 1, Epoch: 4, Kind: Scrub, ID: 7}))
	step(WorkEnded{Region: 1, Kind: Scrub, Run: again, Failed: true})
	begun(step(Work{Term: 1, Region: 1, Epoch: 4, Kind: Scrub, ID: 7}))
}
