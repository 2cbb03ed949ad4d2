package verbs

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestParseConfig(t *testing.T) {
	for s, want := range map[string]Config{
		"":                  {},
		"mlx5_0":            {Device: "mlx5_0"},
		"mlx5_0/2":          {Device: "mlx5_0", Port: 2},
		"mlx5_0/1@10.0.0.7": {Device: "mlx5_0", Port: 1, GID: netip.MustParseAddr("10.0.0.7")},
		"@fd00::7":          {GID: netip.MustParseAddr("fd00::7")},
	} {
		got, err := ParseConfig(s)
		require.NoError(t, err, s)
		require.Equal(t, want, got)
	}
	all, err := ParseConfig("mlx5_0/2@10.0.0.7,rail=a-1,pkey=0x8001,spin=20us,inline=32,windows=off,atomics=required,traffic-class=106,service-level=3,ack-timeout=67ms,retries=7")
	require.NoError(t, err)
	require.Equal(t, Config{Device: "mlx5_0", Port: 2, GID: netip.MustParseAddr("10.0.0.7"), Rail: "a-1", PKey: 0x8001, Spin: 20 * time.Microsecond, Inline: 32,
		Windows: WindowsOff, Atomics: AtomicsRequired, Link: Link{TrafficClass: 106, ServiceLevel: 3, AckTimeout: 67 * time.Millisecond, Retries: 7}}, all)
	require.Equal(t, 14, all.Link.timeout(), "4.096 us << 14 = 67.1 ms")
	require.Equal(t, 16, Config{}.withDefaults().Link.timeout())
	require.Equal(t, mostTimeout, Link{AckTimeout: time.Hour}.timeout())
	none, err := ParseConfig(",spin=0s,inline=0")
	require.NoError(t, err)
	require.Zero(t, none.withDefaults().Spin)
	require.Zero(t, none.withDefaults().Inline)
	require.Less(t, reflect.TypeFor[Config]().NumField(), 13)
	for _, s := range []string{"mlx5_0,tc=1", "mlx5_0,retries=0", "mlx5_0,retries=8", "x,ack-timeout=1us", "x,ack-timeout=9s", "x,service-level=16",
		"x,traffic-class=256", "x,pkey=0", "x,pkey=0x10000", "x,inline=129", "x,spin=2s", "x,spin=-1s", "x,windows=maybe", "x,atomics=none", "x,", "x,windows", "mlx5_0=3", "x,rail=", "x,rail=a b"} {
		_, err := ParseConfig(s)
		require.Error(t, err, s)
	}
	for _, s := range []string{"mlx5_0/", "mlx5_0/0", "mlx5_0/999", "a@b", "a b", "x/1@", "@10.0.0"} {
		_, err := ParseConfig(s)
		require.Error(t, err, s)
	}
}

// TestParseConfigs: what has no = begins another device. Several are named, each once.
func TestParseConfigs(t *testing.T) {
	for s, want := range map[string][]Config{
		"":                       {{}},
		",retries=7":             {{Link: Link{Retries: 7}}},
		"a":                      {{Device: "a"}},
		"a,b/2":                  {{Device: "a"}, {Device: "b", Port: 2}},
		"a/1,a/2":                {{Device: "a", Port: 1}, {Device: "a", Port: 2}},
		"a,rail=x,@10.0.0.7":     {{Device: "a", Rail: "x"}, {GID: netip.MustParseAddr("10.0.0.7")}},
		"a,rail=x,b,rail=y":      {{Device: "a", Rail: "x"}, {Device: "b", Rail: "y"}},
		"a,b,retries=3,inline=0": {{Device: "a"}, {Device: "b", Inline: -1, Link: Link{Retries: 3}}},
	} {
		got, err := ParseConfigs(s)
		require.NoError(t, err, s)
		require.Equal(t, want, got, s)
		require.Equal(t, s, strings.Join(Split(s), ","))
	}
	for _, s := range []string{"a,a", "a,", "a,,b", "a,retries=9,b", "a,b,retries=9", "a/1@10.0.0.7,b,a/1@10.0.0.7", strings.Repeat("a,", MaxDevices) + "a"} {
		_, err := ParseConfigs(s)
		require.Error(t, err, s)
	}
}

// Both sides of a connection have the atomics of a region executed by one unit, or there is no connection.
func TestAgentAtomicsAreAgreed(t *testing.T) {
	some, none := Caps{Device: "mlx5_0", Atomics: "hca"}, Caps{Device: "siw0", Atomics: noAtomics}
	require.False(t, some.Acts(AtomicsAuto))
	require.False(t, some.Acts(AtomicsRequired))
	require.True(t, some.Acts(AtomicsAgent))
	require.True(t, none.Acts(AtomicsAuto))
	for _, c := range []struct {
		client Caps
		want   Atomics
		acts   bool
		says   string
	}{
		{some, AtomicsAuto, false, ""}, {some, AtomicsAuto, true, ""}, {none, AtomicsAuto, true, ""}, {some, AtomicsRequired, false, ""},
		{some, AtomicsRequired, true, "--rdma-atomics required"},
		{none, AtomicsAuto, false, "siw0 has no atomics"},
		{none, AtomicsAgent, false, "siw0 has no atomics"},
	} {
		err := c.client.Agrees(c.want, c.acts)
		if c.says == "" {
			require.NoError(t, err)
		} else {
			require.ErrorContains(t, err, c.says)
		}
	}
}

// What a lane pins, by the formulas of the mlx5 provider: one whose queue holds four full
// chains pins about 650 KiB, a new one a twelfth of that.
func TestPinnedLane(t *testing.T) {
	least, most := PinnedLane()
	require.EqualValues(t, 32<<10+8<<10+8<<10+8<<10, least)
	require.EqualValues(t, 512<<10+128<<10+8<<10+8<<10, most)
}
