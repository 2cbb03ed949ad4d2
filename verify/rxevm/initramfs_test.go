package rxevm

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Images of other checkouts stay, as long as they are among those used last; of builders that died nothing stays.
func TestImagesUsedLastStay(t *testing.T) {
	cache := t.TempDir()
	name := func(i int) string { return filepath.Join(cache, fmt.Sprintf("initrd-6.%d-%012x.gz", i%2, i)) }
	long := time.Now().Add(-time.Hour)
	for i := range keptInitramfs + 3 {
		require.NoError(t, os.WriteFile(name(i), nil, 0o644))
		require.NoError(t, os.Chtimes(name(i), long.Add(time.Duration(i)*time.Minute), long.Add(time.Duration(i)*time.Minute)))
	}
	died := name(99) + ".tmp"
	require.NoError(t, os.WriteFile(died, nil, 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(cache, "lock"), nil, 0o644))
	require.NoError(t, markUsed(name(0)))
	require.NoError(t, dropInitramfs(cache))
	for i := range keptInitramfs + 3 {
		_, err := os.Stat(name(i))
		if i == 0 || i > 3 {
			require.NoError(t, err, "image %d is among those used last", i)
		} else {
			require.ErrorIs(t, err, os.ErrNotExist, "image %d", i)
		}
	}
	require.NoFileExists(t, died)
	require.FileExists(t, filepath.Join(cache, "lock"))
}
