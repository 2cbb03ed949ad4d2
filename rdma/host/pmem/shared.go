package pmem

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// LedgersVariable is the environment variable by which processes of a test share ledgers, in the folder that it names: nodes
// and their clients over shm, whose power PowerOff takes away. Files beside that folder that are mapped whole and trusted are
// flushed to ledgers alone, so nothing else of them is durable.
const LedgersVariable = "QUARRY_PMEM_TEST_LEDGERS"

// SharedLedgers is the folder in which this process shares ledgers with others; empty: it shares none.
func SharedLedgers() string { return os.Getenv(LedgersVariable) }

// Files of a shared ledger: INODE.ledger, and INODE.live, a hard link to the file whose ledger it is. The link keeps the number of the
// inode from another file.
const (
	ledgerSuffix = ".ledger"
	liveSuffix   = ".live"
	newSuffix    = ".new"
	makingLock   = "lock"
)

// shared is what processes have in common of a ledger, beside the durable content. A file of it for n bytes of memory:
//
//	0        n bytes      what is durable
//	n        n/64 x 8     the turn of the write-back that each line is from
//	n+n/8    8            turns given so far
//
// Write-backs have turns because the fence of one process may come after that of another which wrote the line back later: memory
// never goes back to an earlier content of a line. A process that is killed leaves its lock; a fence that it had begun has then
// made some lines durable and others not.
type shared struct {
	file  *os.File // of this process alone, for its lock
	all   []byte
	turns []byte
	given []byte
}

func sharedBytes(n uint64) uint64 { return n + n/8 + 8 }

func (s *shared) lock() {
	if s != nil {
		s.flock(unix.LOCK_EX)
	}
}

func (s *shared) unlock() {
	if s != nil {
		s.flock(unix.LOCK_UN)
	}
}

func (s *shared) flock(how int) {
	if err := flock(s.file, how); err != nil {
		panic(fmt.Sprintf("the lock of the ledger %s: %v", s.file.Name(), err)) // a flush has no other way to tell a test
	}
}

func flock(f *os.File, how int) error {
	for {
		if err := unix.Flock(int(f.Fd()), how); err != unix.EINTR {
			return err
		}
	}
}

// next gives a turn. Preconditions: the lock is held, as of all below.
func (s *shared) next() uint64 {
	if s == nil {
		return 0
	}
	turn := binary.NativeEndian.Uint64(s.given) + 1
	binary.NativeEndian.PutUint64(s.given, turn)
	return turn
}

// newest says that no later write-back of a line is durable.
func (s *shared) newest(at, turn uint64) bool {
	return s == nil || turn > binary.NativeEndian.Uint64(s.turns[at/lineBytes*8:])
}

// done is called after the line was copied: a process that is killed between leaves a line that an earlier write-back can
// replace, and nobody was told that it is durable.
func (s *shared) done(at, turn uint64) {
	if s != nil {
		binary.NativeEndian.PutUint64(s.turns[at/lineBytes*8:], turn)
	}
}

// ledgersOfProcess are those that this process has opened. They stay until it ends.
var ledgersOfProcess = struct {
	sync.Mutex
	by map[string]*Ledger
}{by: map[string]*Ledger{}}

// takeShared has a mapping flushed through the shared ledger of its file, which the first process that maps the file makes.
func takeShared(dir string, f *os.File, off int64, m *Mapping) error {
	at, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil || off != 0 || len(m.Mem)%lineBytes != 0 || strings.HasSuffix(at, " (deleted)") || !strings.HasPrefix(at, filepath.Dir(dir)+string(filepath.Separator)) {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return err
	}
	name := filepath.Join(dir, strconv.FormatUint(st.Ino, 10))
	ledgersOfProcess.Lock()
	defer ledgersOfProcess.Unlock()
	l := ledgersOfProcess.by[name]
	if l == nil {
		if err = makeShared(name, at, m.Mem); err == nil {
			l, err = openShared(name, nil)
		}
		if err != nil {
			return fmt.Errorf("ledger of %s: %w", at, err)
		}
		ledgersOfProcess.by[name] = l
	}
	if len(l.durable) != len(m.Mem) {
		return fmt.Errorf("ledger of %s: it has %d bytes, the file %d", at, len(l.durable), len(m.Mem))
	}
	m.Kind, m.Flusher = KindFSDAX, l.Flusher()
	return nil
}

// makeShared makes the files of a ledger, all of whose memory counts as durable, if it has none yet.
func makeShared(name, file string, live []byte) error {
	making, err := os.OpenFile(filepath.Join(filepath.Dir(name), makingLock), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer making.Close()
	if err := flock(making, unix.LOCK_EX); err != nil {
		return err
	}
	if _, err := os.Stat(name + ledgerSuffix); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// A process that was killed here has left a link, and its file may be gone since, or a part of a ledger.
	for _, left := range []string{name + newSuffix, name + liveSuffix} {
		if err := os.Remove(left); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if err := writeNew(name+newSuffix, live); err != nil {
		return errors.Join(err, os.Remove(name+newSuffix))
	}
	if err = os.Link(file, name+liveSuffix); err == nil {
		err = os.Rename(name+newSuffix, name+ledgerSuffix)
	}
	return err
}

// writeNew writes a ledger with the content of memory, and leaves holes where that is zero.
func writeNew(path string, live []byte) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	err = f.Truncate(int64(sharedBytes(uint64(len(live)))))
	zero := make([]byte, 64<<10)
	for at := 0; at < len(live) && err == nil; at += len(zero) {
		piece := live[at:min(at+len(zero), len(live))]
		if string(piece) != string(zero[:len(piece)]) {
			_, err = f.WriteAt(piece, int64(at))
		}
	}
	return errors.Join(err, f.Close())
}

// openShared opens the ledger over live. live may be nil for one that only flushes.
func openShared(name string, live []byte) (*Ledger, error) {
	f, err := os.OpenFile(name+ledgerSuffix, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	n := (uint64(st.Size()) - 8) / 9 * 8
	if n == 0 || n%lineBytes != 0 || sharedBytes(n) != uint64(st.Size()) || live != nil && uint64(len(live)) != n {
		return nil, errors.Join(fmt.Errorf("%s has %d bytes: no ledger of its file", f.Name(), st.Size()), f.Close())
	}
	all, err := unix.Mmap(int(f.Fd()), 0, int(st.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &Ledger{live: live, durable: all[:n], begun: map[uint64]begun{}, shared: &shared{file: f, all: all, turns: all[n : n+n/8], given: all[n+n/8:]}}, nil
}

// PowerOff is a loss of power of all files that have ledgers in a folder: each has the content afterwards that Ledger.Cut says. lost is how
// many lines have lost a word. Ledgers of files that are gone are removed.
//
// Preconditions: the processes that share the ledgers have ended.
func PowerOff(dir string, survives func() bool) (files, lost int, err error) {
	names, err := filepath.Glob(filepath.Join(dir, "*"+ledgerSuffix))
	for _, name := range names {
		name = strings.TrimSuffix(name, ledgerSuffix)
		gone, lines, ferr := powerOff(name, survives)
		if err = errors.Join(err, ferr); ferr != nil || gone {
			continue
		}
		files, lost = files+1, lost+lines
	}
	return files, lost, err
}

// powerOff cuts one ledger. gone: the file has no other name than the ledger's any more, and both
// are removed. lost is the number of lines that have lost a word.
func powerOff(name string, survives func() bool) (gone bool, lost int, err error) {
	f, err := os.OpenFile(name+liveSuffix, os.O_RDWR, 0)
	if err != nil {
		return false, 0, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return false, 0, err
	}
	if st.Nlink == 1 { // no process keeps the region any more: the ledger is the only one that has it
		return true, 0, errors.Join(os.Remove(name+ledgerSuffix), os.Remove(name+liveSuffix))
	}
	live, err := unix.Mmap(int(f.Fd()), 0, int(st.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return false, 0, err
	}
	defer unix.Munmap(live)
	l, err := openShared(name, live)
	if err != nil {
		return false, 0, err
	}
	image, lost := l.cut(survives)
	l.restart(image)
	return false, lost, errors.Join(unix.Munmap(l.shared.all), l.shared.file.Close())
}
