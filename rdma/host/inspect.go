package host

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// errUnseen: the kernel does not let this process look into another.
var errUnseen = errors.New("this node has no right to look into the process (proc(5), PTRACE_MODE_READ)")

// fileIdentity names the file behind a memory.
type fileIdentity struct {
	mapped string // device and inode as /proc/PID/maps has them: stat(2) has another device on btrfs
	major  uint32 // of stat(2)'s device, for the comparison with descriptors
	minor  uint32 // of stat(2)'s device
	inode  uint64 // the same in /proc/PID/maps and stat(2)
}

// identify finds device and inode of the memory's file, and its text form in /proc/PID/maps.
func (m *Memory) identify() (id fileIdentity, err error) {
	var st unix.Statx_t
	if err := unix.Statx(int(m.file.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_INO, &st); err != nil {
		return id, fmt.Errorf("memory of %s: %w", m.name, err)
	}
	id = fileIdentity{major: st.Dev_major, minor: st.Dev_minor, inode: st.Ino}
	begin := fmt.Sprintf("%p-", m.mem)
	err = eachMapping("/proc/self/maps", func(at, file []byte) bool {
		if strings.HasPrefix("0x"+string(at), begin) {
			id.mapped = string(file)
		}
		return id.mapped == ""
	})
	if err == nil && id.mapped == "" {
		err = errors.New("not found in /proc/self/maps")
	}
	if err != nil {
		return id, fmt.Errorf("memory of %s: its mapping: %w", m.name, err)
	}
	return id, nil
}

// eachMapping calls f with the addresses, and the device and inode, of each mapping until f says no.
func eachMapping(path string, f func(at, file []byte) bool) error {
	maps, err := os.Open(path)
	if err != nil {
		return err
	}
	defer maps.Close()
	lines := bufio.NewReaderSize(maps, 64<<10) // a line has at most four escaped bytes for each of PATH_MAX
	for {
		line, err := lines.ReadSlice('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		at, rest, _ := bytes.Cut(line, []byte(" ")) // at perms offset device inode path
		_, rest, _ = bytes.Cut(rest, []byte(" "))
		_, rest, _ = bytes.Cut(rest, []byte(" "))
		n := bytes.IndexByte(rest, ' ')
		n += 1 + bytes.IndexAny(rest[n+1:], " \n")
		if !f(at, rest[:n]) {
			return nil
		}
	}
}

// sight is what to look for in processes.
type sight struct {
	memories []*Memory      // looked for
	ids      []fileIdentity // of memories, at the same index
	tables   int            // tables of files that were looked through
}

// newSight prepares a search of processes for mappings and descriptors of these memories.
func newSight(memories []*Memory) (*sight, error) {
	s := &sight{memories: memories}
	for _, m := range memories {
		id, err := m.identity()
		if err != nil {
			return nil, err
		}
		s.ids = append(s.ids, id)
	}
	return s, nil
}

// maxTables bounds how many tables of a process are compared with those of its other threads.
const maxTables = 16

// look returns the memories that a process can write: it maps them, or has a descriptor of
// them. errUnseen if that cannot be told. A process that has ended can write none. parked
// says that sockets of the process hold descriptors that it has not received yet, which may
// be of any file; that costs a read for each socket, and is false unless sockets is set.
func (s *sight) look(pid int, sockets bool) (held []*Memory, parked bool, err error) {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	tasks, err := names(filepath.Join(dir, "task"))
	if err != nil {
		return nil, false, seen(err)
	}
	found := make([]bool, len(s.ids))
	mapped, looked := false, []int(nil) // a thread of each table that was looked through
	for _, task := range tasks {        // threads have one address space, but may have tables of files of their own
		at := filepath.Join(dir, "task", task)
		if !mapped { // a thread that has ended has none
			if mapped, err = s.mappings(at, dir, found); seen(err) != nil {
				return nil, false, seen(err)
			}
		}
		id, err := strconv.Atoi(task)
		if err != nil {
			return nil, false, err
		}
		if slices.ContainsFunc(looked, func(other int) bool { return shareFiles(other, id) }) {
			continue
		}
		more, err := s.descriptors(at, found, sockets)
		if seen(err) != nil {
			return nil, false, seen(err)
		}
		s.tables++
		if err == nil && len(looked) < maxTables {
			looked = append(looked, id)
		}
		parked = parked || more
	}
	for i, m := range s.memories {
		if found[i] {
			held = append(held, m)
		}
	}
	return held, parked, nil
}

// shareFiles says whether two threads have one table of open files; false if that cannot be told. A thread can leave a
// table that it shares and never join another thread's. So if both have one table now, they had it when the first one's was
// looked through: a server with 50 000 connections and 60 threads costs one look through its table, and not 60.
func shareFiles(a, b int) bool {
	const files = 2 // KCMP_FILES of kcmp(2)
	order, _, errno := unix.RawSyscall6(unix.SYS_KCMP, uintptr(a), uintptr(b), files, 0, 0, 0)
	return errno == 0 && order == 0
}

// seen is nil for errors of processes and threads that have ended meanwhile.
func seen(err error) error {
	switch {
	case err == nil, errors.Is(err, unix.ENOENT), errors.Is(err, unix.ESRCH):
		return nil
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return errUnseen
	}
	return err
}

// mappings looks through the mappings of a task, and sets found of the memories that it has
// mapped for writing. any: it has mappings at all.
func (s *sight) mappings(task, process string, found []bool) (any bool, err error) {
	err = eachMapping(filepath.Join(task, "maps"), func(at, file []byte) bool {
		any = true
		for i := range s.ids {
			if !found[i] && string(file) == s.ids[i].mapped {
				found[i] = writable(unix.AT_FDCWD, filepath.Join(process, "map_files", string(at)))
			}
		}
		return true
	})
	return any, err
}

// descriptors looks through the open files of a task, and sets found of the memories that one of
// them could write to. parked: a descriptor may be on its way in a socket.
func (s *sight) descriptors(task string, found []bool, sockets bool) (parked bool, err error) {
	dir, err := os.Open(filepath.Join(task, "fd"))
	if err != nil {
		return false, err
	}
	defer dir.Close()
	numbers, err := dir.Readdirnames(-1)
	if err != nil {
		return false, err
	}
	for _, n := range numbers {
		var st unix.Statx_t
		err := unix.Statx(int(dir.Fd()), n, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, unix.STATX_INO|unix.STATX_TYPE, &st)
		if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM) {
			return false, err
		}
		if err != nil {
			continue // closed meanwhile, or of a file system that does not answer
		}
		if st.Mode&unix.S_IFMT == unix.S_IFSOCK {
			parked = parked || sockets && unreceived(filepath.Join(task, "fdinfo", n))
			continue
		}
		for i, id := range s.ids {
			if !found[i] && st.Ino == id.inode && st.Dev_major == id.major && st.Dev_minor == id.minor {
				found[i] = writable(int(dir.Fd()), n)
			}
		}
	}
	return parked, nil
}

// writable says whether a link below /proc/PID/map_files or fd is to a file opened for writing.
func writable(dir int, link string) bool {
	var st unix.Stat_t
	err := unix.Fstatat(dir, link, &st, unix.AT_SYMLINK_NOFOLLOW)
	return err != nil || st.Mode&0o200 != 0
}

// unreceived says whether descriptors wait in a socket's queue (Linux 5.12).
func unreceived(info string) bool {
	b, err := os.ReadFile(info)
	if err != nil {
		return false
	}
	_, count, ok := bytes.Cut(b, []byte("scm_fds: "))
	return ok && !bytes.HasPrefix(count, []byte("0\n"))
}

// names lists a folder.
func names(dir string) ([]string, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Readdirnames(-1)
}

// others calls f for every process but this one, also for those that begin meanwhile.
func others(f func(pid int) error) error {
	done := map[int]bool{os.Getpid(): true}
	for again := true; again; {
		again = false
		entries, err := names("/proc")
		if err != nil {
			return fmt.Errorf("the list of processes: %w", err)
		}
		for _, e := range entries {
			pid, err := strconv.Atoi(e)
			if err != nil || done[pid] {
				continue
			}
			done[pid], again = true, true
			if err := f(pid); err != nil {
				return err
			}
		}
	}
	return nil
}
