package pool

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/rdma/host"
)

// Restoring is the end of the path under which Restore makes a local part.
const Restoring = ".restoring"

// Restore makes the local part of a set, which is missing, as a replica is: the one with this path, this name, or, of a host, USER@HOST NAME, or, for "", the first of those that are there,
// which have to have the same last owner then, and of which one that is not torn is taken. The next Open makes the other replicas as it is. The part has its path when it is whole.
//
// Errors: os.ErrExist: the part is there; ErrMismatch; ErrTorn; ErrNoPart, client.ErrNoName: there is no such replica; ErrOpen; others as of package function Open.
func (s *Set) Restore(ctx context.Context, c *client.Client, from string, progress func(done uint64)) (r Report, err error) {
	w, err := s.in(ctx, c)
	if err != nil {
		return r, err
	}
	return s.restore(ctx, w, from, progress)
}

func (s *Set) restore(ctx context.Context, w *world, from string, progress func(done uint64)) (r Report, err error) {
	if err := errors.Join(ctx.Err(), s.check()); err != nil {
		return r, err
	}
	if _, err := os.Lstat(s.Part.Path); !errors.Is(err, os.ErrNotExist) {
		return r, errors.Join(fmt.Errorf("%w: %s: a local part is not overwritten: move it away", os.ErrExist, s.Part.Path), err)
	}
	want := Part{Path: s.Part.Path + Restoring, Bytes: s.Part.Bytes}
	m := &Memory{}
	// A Restore that has ended before its last step may have left a file.
	if m.part, err = w.remakePart(want, partHead{State: partMaking}); err != nil {
		return r, fmt.Errorf("the file that Restore makes before it has the part's path: %w", err)
	}
	defer func() {
		if err != nil {
			_ = os.Remove(want.Path) // while it is locked: then it is this call's
		}
		err = m.abandon(ctx, err)
	}()
	if err := m.sources(ctx, w, s, from); err != nil {
		return r, err
	}
	source := slices.MinFunc(m.replicas, func(a, b replica) int { return doubts(a) - doubts(b) }) // the first one of these
	if source.torn() && from == "" {
		return r, fmt.Errorf("%w: a Sync of %s has not returned, or a Persist has failed there, so it may have later Persists and lack earlier ones: name it as the source to restore it nevertheless", ErrTorn, source)
	}
	if r, err = source.Restore(ctx, progress); err != nil {
		return r, fmt.Errorf("%s: %w", source, err)
	}
	h := m.part.head
	h.Set, h.State, h.Token = source.set(), partOpen, tokenOf(source.owner())
	if err = errors.Join(m.part.flush(0, h.Bytes), m.part.change(h)); err != nil {
		return r, err
	}
	if err = os.Link(want.Path, s.Part.Path); err != nil {
		return r, err
	}
	return r, errors.Join(os.Remove(want.Path), syncFolder(want.Path))
}

// doubts is how much speaks against a replica as a source of Restore.
func doubts(r replica) int {
	switch {
	case r.torn():
		return 2
	case r.Dirty():
		return 1
	}
	return 0
}

// sources opens the replicas that Restore can read. Those that are not there, or were not made whole, count as none.
func (m *Memory) sources(ctx context.Context, w *world, s *Set, from string) error {
	var gone error
	for _, named := range s.Mirrors {
		if from != "" && from != named.Path {
			continue
		}
		p, err := w.openPart(named)
		if err == nil {
			m.replicas = append(m.replicas, newMirror(p, m.Bytes()))
		} else if gone = errors.Join(gone, err); !errors.Is(err, ErrNoPart) && !errors.Is(err, ErrUnfinished) {
			return err
		}
	}
	for _, t := range w.targets(s) {
		if from != "" && from != t.String() {
			continue
		}
		p, err := t.open(ctx, m.Bytes(), nil)
		if err == nil {
			m.replicas = append(m.replicas, p)
		} else if gone = errors.Join(gone, err); !errors.Is(err, client.ErrNoName) && !errors.Is(err, ErrUnfinished) {
			return err
		}
	}
	if len(m.replicas) == 0 {
		if gone == nil {
			gone = fmt.Errorf("%w: %s has no replica %q", client.ErrArgument, s.Path, from)
		}
		return gone
	}
	for _, r := range m.replicas[1:] {
		if a := m.replicas[0]; r.set() != a.set() || r.owner() != a.owner() {
			return fmt.Errorf("%w: the last owner of %s is not that of %s: say which one to restore from", ErrMismatch, r, a)
		}
	}
	return nil
}

// Check compares the local part, which a program may have open, with all replicas, and changes nothing. It returns the sum. Beside Persists that are running it
// may find differences.
func (s *Set) Check(ctx context.Context, c *client.Client, progress func(done uint64)) (r Report, err error) {
	w, err := s.in(ctx, c)
	if err := errors.Join(err, s.check()); err != nil {
		return r, err
	}
	local, unmap, err := readPart(s.Part)
	if err != nil {
		return r, err
	}
	defer unmap()
	for _, p := range s.Mirrors {
		mine, unmap, err := readPart(p)
		if err != nil {
			return r, err
		}
		one, err := comparePart(ctx, local, mine, progress)
		unmap()
		if r.add(one); err != nil {
			return r, err
		}
	}
	for _, t := range w.targets(s) {
		one, err := t.check(ctx, local, progress)
		if r.add(one); err != nil {
			return r, err
		}
	}
	return r, nil
}

// readPart maps the memory of a local part for reading. It takes no lock: another process may have the part open.
func readPart(p Part) (memory []byte, unmap func(), err error) {
	f, h, err := readHeader(p)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	if h.State == partMaking {
		return nil, nil, fmt.Errorf("%w: %s was not made whole", ErrUnfinished, p.Path)
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(p.Bytes), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", p.Path, err)
	}
	return mem[HeaderBytes:], func() { _ = unix.Munmap(mem) }, nil
}

// readHeader opens a local part for reading.
func readHeader(p Part) (_ *os.File, h partHead, err error) {
	f, err := os.Open(p.Path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, h, fmt.Errorf("%w: %s", ErrNoPart, p.Path)
	}
	if err != nil {
		return nil, h, err
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	st, err := f.Stat()
	if err != nil {
		return nil, h, err
	}
	if st.Mode().IsRegular() && st.Size() == 0 {
		return f, partHead{State: partMaking}, nil
	}
	if !st.Mode().IsRegular() || uint64(st.Size()) != p.Bytes {
		return nil, h, fmt.Errorf("%w: %s is no file of %d bytes", ErrMismatch, p.Path, p.Bytes)
	}
	page := make([]byte, HeaderBytes)
	if _, err := io.ReadFull(f, page); err != nil {
		return nil, h, fmt.Errorf("%s: %w", p.Path, err)
	}
	h, err = decodePartHead(page)
	if errors.Is(err, errNoHead) {
		h, err = partHead{State: partMaking}, nil
	}
	if err != nil {
		return nil, h, fmt.Errorf("%s: %w", p.Path, err)
	}
	return f, h, nil
}

// PartInfo describes a local part.
type PartInfo struct {
	Path    string `json:"path"`
	Bytes   uint64 `json:"bytes"`             // of the memory
	State   string `json:"state"`             // Making, Ready; missing or damaged
	Dirty   bool   `json:"dirty"`             // it is open, or was not closed in order
	Torn    bool   `json:"torn,omitempty"`    // of a mirror: a Sync has not returned, or a Persist has failed
	Durable bool   `json:"durable"`           // it survives a loss of power
	Problem string `json:"problem,omitempty"` // why the rest is not known, or why it is not durable
}

// States of a local part beside Making and Ready.
const (
	Missing = "missing"
	Damaged = "damaged"
)

// Info describes the local parts of a set, the program's memory first.
func (s *Set) Info() (all []PartInfo) {
	for _, p := range s.parts() {
		i := PartInfo{Path: p.Path, Bytes: p.Bytes - HeaderBytes, State: Ready}
		f, h, err := readHeader(p)
		switch {
		case errors.Is(err, ErrNoPart):
			i.State = Missing
		case err != nil:
			i.State, i.Problem = Damaged, err.Error()
		case h.State == partMaking:
			i.State = Making
		}
		if err == nil {
			i.Dirty, i.Torn = h.State != partClosed, h.State == partTorn
			fs, err := host.FileSystemOf(p.Path)
			if i.Durable = err == nil && fs.Volatile == nil; !i.Durable {
				i.Problem = errors.Join(err, fs.Volatile).Error()
			}
			f.Close()
		}
		all = append(all, i)
	}
	return all
}

// Remove removes the pools of a set and its local parts, which nobody has open. A Remove that failed can be made again. Without the local part nothing is removed.
//
// Errors: ErrNoPart, ErrNotPart, ErrMismatch, ErrOpen: nothing was removed.
func (s *Set) Remove(ctx context.Context, c *client.Client) error {
	w, err := s.in(ctx, c)
	if err := errors.Join(err, s.check()); err != nil {
		return err
	}
	var held []*part
	defer func() {
		for _, p := range held {
			_ = p.close()
		}
	}()
	for _, named := range s.parts() {
		p, err := holdPart(named)
		if errors.Is(err, ErrNoPart) && len(held) > 0 {
			continue
		}
		if err != nil {
			return err
		}
		if held = append(held, p); p.head.Set != held[0].head.Set && p.head.Magic != 0 {
			return fmt.Errorf("%w: %s is of another set than %s", ErrMismatch, p.Path, held[0].Path)
		}
	}
	var there []target
	for _, t := range w.targets(s) {
		i, err := t.Stat(ctx)
		if errors.Is(err, client.ErrNoName) {
			continue
		}
		if err != nil {
			return err
		}
		if held[0].head.Magic == 0 {
			continue // the header comes before the pools
		}
		if i.State == Ready && i.Attr.PoolsetUUID != held[0].head.Set {
			return fmt.Errorf("%w: pool %q is of another set than %s", ErrMismatch, t, s.Part.Path)
		}
		there = append(there, t)
	}
	for _, t := range there {
		if err := t.remove(ctx); err != nil && !errors.Is(err, client.ErrNoName) {
			return err
		}
	}
	for i := len(held) - 1; i >= 0; i-- { // the program's memory last: by its header Remove can be made again
		if err := os.Remove(held[i].Path); err != nil {
			return err
		}
	}
	return nil
}

// holdPart locks a local part, whole or not.
func holdPart(named Part) (*part, error) {
	f, h, err := readHeader(named)
	if err != nil {
		return nil, err
	}
	p := &part{Part: named, file: f, head: h}
	if err := p.lock(); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}
