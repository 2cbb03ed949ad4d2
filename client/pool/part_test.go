package pool

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLockOfAFileThatIsGone: a file that was removed or replaced between its opening and its lock is not locked for its path.
func TestLockOfAFileThatIsGone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "part")
	for _, another := range []bool{false, true} {
		f, err := os.Create(path)
		require.NoError(t, err)
		p := &part{Part: Part{Path: path}, file: f}
		require.NoError(t, p.lock())
		require.NoError(t, os.Remove(path))
		if another {
			require.NoError(t, os.WriteFile(path, nil, 0o600))
		}
		require.ErrorIs(t, p.lock(), ErrOpen)
		require.NoError(t, p.close())
	}
}
