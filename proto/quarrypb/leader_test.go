package quarrypb

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A controller that is asked over http leads only to known hosts, and one over https only to https.
func TestLeaderFrom(t *testing.T) {
	known := []string{"http://c1:7420", "https://c2:7420", "http://10.0.0.3:7421"}
	for _, c := range []struct{ asked, named, want string }{
		{"http://c1:7420", "http://c2:7420/", "http://c2:7420"},
		{"http://c1:7420", "http://10.0.0.3:9", "http://10.0.0.3:9"},
		{"http://c1:7420", "https://c1:7420", "https://c1:7420"},
		{"http://c1:7420", "http://evil:7420", ""},
		{"http://c1:7420", "https://evil", ""},
		{"http://c1:7420", "http://c1:7420@evil/", ""},
		{"http://c1:7420", "http://evil/c1:7420", ""},
		{"http://c1:7420", "http://c1.evil:7420", ""},
		{"http://c1:7420", "ftp://c1", ""},
		{"http://c1:7420", "c1", ""},
		{"http://c1:7420", "", ""},
		{"https://c2:7420", "http://c1:7420", ""},
		{"https://c2:7420", "https://c9:7420", "https://c9:7420"},
		{"https://c2:7420", "", ""},
	} {
		require.Equal(t, c.want, LeaderFrom(c.asked, c.named, known), "%s names %s", c.asked, c.named)
	}
}
