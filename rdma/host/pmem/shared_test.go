package pmem

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// sharing has this process share ledgers in a new folder, and makes a file beside it.
func sharing(t *testing.T, bytes int) (dir string, f *os.File) {
	t.Helper()
	data, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	dir = filepath.Join(data, "ledgers")
	require.NoError(t, os.Mkdir(dir, 0o700))
	t.Setenv(LedgersVariable, dir)
	f, err = os.Create(filepath.Join(data, "region-1"))
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	require.NoError(t, f.Truncate(int64(bytes)))
	return dir, f
}

func mapped(t *testing.T, f *os.File, bytes uint64) Mapping {
	t.Helper()
	m, err := Map(f, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, true)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Munmap(m.Mem) })
	return m
}

// What was flushed stays when the power goes, what was not is lost, and what stayed is durable afterwards.
func TestPowerOff(t *testing.T) {
	dir, f := sharing(t, 64<<10)
	_, err := f.WriteAt([]byte{7}, 32<<10)
	require.NoError(t, err)
	m := mapped(t, f, 64<<10)
	require.Equal(t, CLWB, m.Flusher.Way())
	m.Mem[0], m.Mem[64], m.Mem[8192] = 1, 2, 3
	require.NoError(t, m.Flusher.Persist(m.Mem, 64, 8))
	off := func(survives func() bool, lost int) {
		t.Helper()
		files, n, err := PowerOff(dir, survives)
		require.NoError(t, err)
		require.Equal(t, []int{1, lost}, []int{files, n})
	}
	off(None, 2)
	require.Equal(t, []byte{0, 2, 0, 7}, []byte{m.Mem[0], m.Mem[64], m.Mem[8192], m.Mem[32<<10]}, "what was there first is durable")
	m.Mem[0] = 4
	off(All, 0)
	off(None, 0)
	require.EqualValues(t, 4, m.Mem[0], "it survived the first loss of power")

	require.NoError(t, os.Remove(f.Name()))
	files, _, err := PowerOff(dir, None)
	require.NoError(t, err)
	require.Zero(t, files)
	left, err := filepath.Glob(filepath.Join(dir, "*.l*"))
	require.NoError(t, err)
	require.Empty(t, left, "the ledger of a file that is gone")
}

// A fence of one process leaves alone what another has written back later and fenced.
func TestSharedFencesKeepTheNewestLine(t *testing.T) {
	dir, f := sharing(t, 4096)
	m := mapped(t, f, 4096)
	names, err := filepath.Glob(filepath.Join(dir, "*"+ledgerSuffix))
	require.NoError(t, err)
	require.Len(t, names, 1)
	other, err := openShared(names[0][:len(names[0])-len(ledgerSuffix)], nil)
	require.NoError(t, err)
	t.Cleanup(func() { unix.Munmap(other.shared.all); other.shared.file.Close() })
	mine := m.Flusher.unit
	m.Mem[0] = 1
	mine.writeBack(m.Mem, 0, 8)
	m.Mem[0] = 2
	other.writeBack(m.Mem, 0, 8)
	other.fence()
	mine.fence()
	_, lost, err := PowerOff(dir, None)
	require.NoError(t, err)
	require.Zero(t, lost)
	require.EqualValues(t, 2, m.Mem[0])
	m.Mem[0] = 3
	mine.writeBack(m.Mem, 0, 8)
	mine.fence()
	_, _, err = PowerOff(dir, None)
	require.NoError(t, err)
	require.EqualValues(t, 3, m.Mem[0], "turns go on")
}

// A process that was killed while it made a ledger leaves a link, perhaps to a file that is gone, and a part of a ledger: the next
// one makes it anew. One that is not of the file's length is refused.
func TestLedgerThatWasNotFinished(t *testing.T) {
	dir, f := sharing(t, 4096)
	var id unix.Stat_t
	require.NoError(t, unix.Stat(f.Name(), &id))
	stale := filepath.Join(filepath.Dir(dir), "stale")
	require.NoError(t, os.WriteFile(stale, make([]byte, 100), 0o600))
	name := filepath.Join(dir, strconv.FormatUint(id.Ino, 10))
	require.NoError(t, os.Link(stale, name+liveSuffix))
	require.NoError(t, os.WriteFile(name+newSuffix, []byte("part"), 0o600))
	m := mapped(t, f, 4096)
	m.Mem[0] = 1
	_, lost, err := PowerOff(dir, None)
	require.NoError(t, err)
	require.Equal(t, 1, lost)
	require.Zero(t, m.Mem[0])
	require.NoFileExists(t, name+newSuffix)

	g, err := os.Create(filepath.Join(filepath.Dir(dir), "region-2"))
	require.NoError(t, err)
	defer g.Close()
	require.NoError(t, g.Truncate(8192))
	require.NoError(t, unix.Stat(g.Name(), &id))
	require.NoError(t, os.WriteFile(filepath.Join(dir, strconv.FormatUint(id.Ino, 10)+ledgerSuffix), make([]byte, 99), 0o600))
	_, err = Map(g, 0, 8192, unix.PROT_READ|unix.PROT_WRITE, true)
	require.ErrorContains(t, err, "no ledger of its file")
}

// Memory that is not trusted, files elsewhere and parts of files have no ledger.
func TestWhatHasNoSharedLedger(t *testing.T) {
	dir, f := sharing(t, 8192)
	for _, c := range []struct {
		off     int64
		trusted bool
	}{{0, false}, {4096, true}} {
		m, err := Map(f, c.off, 4096, unix.PROT_READ|unix.PROT_WRITE, c.trusted)
		require.NoError(t, err)
		require.NoError(t, unix.Munmap(m.Mem))
	}
	elsewhere, err := os.Create(filepath.Join(t.TempDir(), "region-3"))
	require.NoError(t, err)
	defer elsewhere.Close()
	require.NoError(t, elsewhere.Truncate(4096))
	mapped(t, elsewhere, 4096)
	files, _, err := PowerOff(dir, None)
	require.NoError(t, err)
	require.Zero(t, files)
}
