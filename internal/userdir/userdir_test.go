package userdir

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTokensAreOfOneUserAndOnePort(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	require.Empty(t, Token("127.0.0.1:7420"))
	file, err := KeepToken("127.0.0.1:7420", "secret")
	require.NoError(t, err)
	st, err := os.Stat(file)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), st.Mode())
	for address, want := range map[string]string{
		"127.0.0.1:7420": "secret", "localhost:7420": "secret", "[::1]:7420": "secret",
		"127.0.0.1:7421": "", "10.0.0.1:7420": "", "some.host:7420": "", "127.0.0.1": "", "": "",
	} {
		require.Equal(t, want, Token(address), address)
	}
	_, err = KeepToken("127.0.0.1:7420", "another")
	require.NoError(t, err)
	require.Equal(t, "another", Token("127.0.0.1:7420"))

	// A folder in which others can write is not believed.
	require.NoError(t, os.Chmod(Path(), 0o777))
	require.Empty(t, Token("127.0.0.1:7420"))
	_, err = KeepToken("127.0.0.1:7420", "secret")
	require.ErrorContains(t, err, "remove it")
}
