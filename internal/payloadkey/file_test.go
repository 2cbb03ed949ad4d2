package payloadkey

import (
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func add(k Key) func([]Entry) ([]Entry, error) {
	return func(list []Entry) ([]Entry, error) { return append(list, Entry{"shop", k}), nil }
}

// TestKeysAreAddedTogether: a key that was added is not lost to another change of the file.
func TestKeysAreAddedTogether(t *testing.T) {
	name := filepath.Join(t.TempDir(), "keys")
	var wg sync.WaitGroup
	errs := make([]error, 32)
	for i := range errs {
		wg.Go(func() { errs[i] = ChangeFile(name, add(Key{byte(i), 1})) })
	}
	wg.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	list, err := ReadFile(name)
	require.NoError(t, err)
	require.Len(t, list, len(errs))
	left, err := os.ReadDir(filepath.Dir(name))
	require.NoError(t, err)
	require.Len(t, left, 1, "no other file is left")
}

// TestChangedFilesStayWhereTheyAre: behind a link, and with their owner and mode.
func TestChangedFilesStayWhereTheyAre(t *testing.T) {
	dir := t.TempDir()
	name, link := filepath.Join(dir, "keys"), filepath.Join(dir, "link")
	require.NoError(t, os.Symlink("keys", link))
	require.ErrorIs(t, ChangeFile(link, add(Key{1})), fs.ErrNotExist, "the link leads nowhere")
	require.NoError(t, ChangeFile(name, add(Key{1})))
	owner := os.Getuid()
	if owner == 0 {
		owner = 12345
		require.NoError(t, os.Chown(name, owner, 54321))
	} else {
		t.Log("not root: the owner is this user")
	}
	require.NoError(t, ChangeFile(link, add(Key{2})))
	to, err := os.Readlink(link)
	require.NoError(t, err)
	require.Equal(t, "keys", to)
	list, err := ReadFile(name)
	require.NoError(t, err)
	require.Len(t, list, 2)
	var st unix.Stat_t
	require.NoError(t, unix.Stat(name, &st))
	require.Equal(t, owner, int(st.Uid))
	require.Equal(t, uint32(0o600), st.Mode&0o777)
}

// TestModesOfKeyFiles: secrets of root are mounted for a group, other files have one reader.
func TestModesOfKeyFiles(t *testing.T) {
	name := filepath.Join(t.TempDir(), "keys")
	require.NoError(t, ChangeFile(name, add(Key{1})))
	refused := func(mode fs.FileMode, is bool) {
		t.Helper()
		require.NoError(t, os.Chmod(name, mode))
		_, err := ReadFile(name)
		if !is {
			require.NoError(t, err)
			return
		}
		require.ErrorContains(t, err, "chmod 600")
	}
	for mode, is := range map[fs.FileMode]bool{0o400: false, 0o600: false, 0o660: true, 0o604: true, 0o602: true, 0o601: true, 0o610: true} {
		refused(mode, is)
	}
	refused(0o440, os.Getuid() != 0)
	if os.Getuid() == 0 {
		require.NoError(t, os.Chown(name, 12345, 54321))
		refused(0o440, true)
	}
	pipe := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, unix.Mkfifo(pipe, 0o600))
	_, err := ReadFile(pipe)
	require.ErrorContains(t, err, "no regular file", "and no waiting for a writer")
}
