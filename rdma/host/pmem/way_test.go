package pmem

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// The best instruction of the processor is taken, or the one that the variable names and the
// processor has.
func TestChoice(t *testing.T) {
	all := features{clflush: true, clflushopt: true, clwb: true}
	for _, c := range []struct {
		arch     string
		has      features
		override string
		want     Way
		says     string
	}{
		{"amd64", all, "", CLWB, ""},
		{"amd64", features{clflush: true, clflushopt: true}, "", CLFLUSHOPT, ""},
		{"amd64", features{clflush: true}, "", CLFLUSH, ""},
		{"amd64", features{}, "", Msync, ""},
		{"amd64", features{dcCVAP: true}, "", Msync, ""},
		{"amd64", all, "clflush", CLFLUSH, ""},
		{"amd64", all, "clflushopt", CLFLUSHOPT, ""},
		{"amd64", all, "msync", Msync, ""},
		{"amd64", features{clflush: true}, "clwb", NoWay, "choose one of: clflush msync"},
		{"amd64", all, "dc-cvap", NoWay, "choose one of: clwb clflushopt clflush msync"},
		{"amd64", all, "fence", NoWay, "QUARRY_PMEM_FLUSH=fence"},
		{"arm64", features{dcCVAP: true}, "", DCCVAP, ""},
		{"arm64", features{}, "", Msync, ""},
		{"arm64", features{dcCVAP: true}, "msync", Msync, ""},
		{"arm64", features{dcCVAP: true}, "clwb", NoWay, "choose one of: dc-cvap msync"},
		{"riscv64", features{}, "", Msync, ""},
		{"riscv64", features{}, "clwb", NoWay, "choose one of: msync"},
	} {
		got, err := choose(c.arch, c.has, c.override)
		require.Equal(t, c.want, got, "%+v", c)
		if c.says == "" {
			require.NoError(t, err, "%+v", c)
		} else {
			require.ErrorContains(t, err, c.says, "%+v", c)
		}
	}
	// What is chosen has its instructions.
	way, err := choose(runtime.GOARCH, cpuFeatures(), "")
	require.NoError(t, err)
	require.Equal(t, way != Msync, unitOf(way) != nil, "%v", way)
}

func TestGranularityFollowsTheWay(t *testing.T) {
	want := map[Way]string{NoWay: "volatile", Msync: "page", CLFLUSH: "line", CLFLUSHOPT: "line", CLWB: "line", DCCVAP: "line", FenceAlone: "none"}
	for way, granularity := range want {
		f := Flusher{way: way}
		require.Equal(t, granularity, f.Granularity())
		require.Equal(t, way != NoWay, f.Persistent())
		require.NotEmpty(t, way.String())
	}
	require.Len(t, wayNames, len(want))
}
