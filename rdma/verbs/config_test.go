package verbs

import (
	"net/netip"
	"testing"

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
	for _, s := range []string{"mlx5_0/", "mlx5_0/0", "mlx5_0/999", "a@b", "a b", "x/1@", "@10.0.0"} {
		_, err := ParseConfig(s)
		require.Error(t, err, s)
	}
}
