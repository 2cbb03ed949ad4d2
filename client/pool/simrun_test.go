package pool

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
)

const (
	simBytes = PartBytes + 4*HeaderBytes // of the memory
	simWords = simBytes / 8
)

// simEvent is a range that was persisted.
type simEvent struct {
	at    int
	words []uint64
}

// simRun is one schedule, and what is known of the memory and its replicas.
type simRun struct {
	*testing.T
	w      *simWorld
	r      *rand.Rand
	set    *Set
	m      *Memory
	queue  bool
	number uint64

	live []uint64         // what the local part has
	sure []uint64         // and has flushed
	late map[int][]uint64 // words that were stored since, by place

	bases   [][]uint64      // what replicas had at the last Open or Sync
	events  []simEvent      // since
	has     map[string]int  // how many of these a replica has for sure
	gap     map[string]bool // it lacks one, and is not torn: it has no later one
	stuck   map[string]bool // a mirror, whose flush has failed
	marked  map[string]bool // it lacks one, and is torn
	closed  bool            // in order: what was not persisted is in the local part alone
	broken  bool            // a flush of the local part has failed
	settled bool            // no Open and no Sync has failed since

	copies []string // of local parts
	trail  []string
}

func (x *simRun) note(format string, args ...any) {
	x.trail = append(x.trail, fmt.Sprintf(format, args...))
}

func (x *simRun) fail(format string, args ...any) {
	x.Helper()
	x.Fatalf("%s\nbehind %q", fmt.Sprintf(format, args...), x.trail)
}

func (x *simRun) must(err error) {
	x.Helper()
	if err != nil {
		x.fail("%v", err)
	}
}

func (x *simRun) chance(n int) bool { return x.r.IntN(n) == 0 }

// replicas are their names.
func (x *simRun) replicas() (names []string) {
	for _, p := range x.set.Mirrors {
		names = append(names, p.Path)
	}
	return append(names, x.set.Pools...)
}

// content is what a replica has; nil: it is not there.
func (x *simRun) content(name string) []uint64 {
	if p := x.w.pools[name]; p != nil {
		return wordsOf(p.memory)
	}
	b, err := os.ReadFile(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	x.must(err)
	return wordsOf(b[HeaderBytes:])
}

// TestSimulatedSets: whatever is killed, lost, copied or cut off, the local part has what was persisted; replicas have it from the next Open on, and before that some moment of it,
// which Restore gives; and no copy of a local part takes anything back.
func TestSimulatedSets(t *testing.T) {
	ctx := t.Context()
	seeds := uint64(80)
	if testing.Short() {
		seeds = 12
		t.Log("-short: fewer seeds")
	}
	for seed := range seeds {
		dir, err := os.MkdirTemp("/dev/shm", "quarry-pool-sim-")
		if err != nil {
			dir = t.TempDir()
		}
		func() {
			defer func() { require.NoError(t, os.RemoveAll(dir)) }()
			simulate(ctx, t, seed, dir)
		}()
	}
}

func simulate(ctx context.Context, t *testing.T, seed uint64, dir string) {
	r := rand.New(rand.NewPCG(seed, 7))
	for _, sub := range []string{"frozen", "copies"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, sub), 0o700))
	}
	x := &simRun{T: t, w: newSimWorld(r, dir), r: r, queue: r.IntN(3) == 0, live: make([]uint64, simWords)}
	x.note("seed %d", seed)
	x.w.durable = r.IntN(4) != 0
	x.set = &Set{Part: Part{filepath.Join(dir, "part"), HeaderBytes + simBytes}, Pools: []string{"one", "two"}[:1+r.IntN(2)]}
	if x.w.durable && r.IntN(2) == 0 {
		x.set.Mirrors = []Part{{filepath.Join(dir, "mirror"), HeaderBytes + simBytes}}
	}
	var err error
	x.m, err = x.set.create(ctx, x.w.world, Options{}, x.options())
	x.must(err)
	x.opened()
	for range 14 {
		x.use(ctx)
		x.end(ctx)
		x.disturb(ctx)
		for tries := 0; x.m == nil; tries++ {
			if tries == 50 {
				x.fail("the set cannot be opened")
			}
			x.start(ctx, tries)
		}
	}
	x.must(x.m.Close(ctx))
}

func (x *simRun) options() MemoryOptions {
	if x.queue {
		return MemoryOptions{Queue: MinQueue}
	}
	return MemoryOptions{}
}

// opened: all replicas are as the memory is, or have what was persisted before an orderly Close.
func (x *simRun) opened() {
	x.live = wordsOf(x.m.Bytes())
	var bases [][]uint64
	for _, name := range x.replicas() {
		has := x.content(name)
		if !slices.Equal(has, x.live) && !(x.closed && x.isMoment(has, len(x.events))) {
			x.fail("%s is not as the memory is", name)
		}
		bases = append(bases, has)
		if p := x.w.pools[name]; p != nil && p.torn {
			x.fail("%s is torn", name)
		}
	}
	x.bases, x.events, x.settled, x.closed = bases, nil, true, false
	x.has, x.gap, x.marked, x.stuck = map[string]int{}, map[string]bool{}, map[string]bool{}, map[string]bool{}
}

// flushed: the local part has flushed all.
func (x *simRun) flushed() {
	x.sure, x.late, x.broken = slices.Clone(x.live), map[int][]uint64{}, false
}

// use stores, persists, and synchronises.
func (x *simRun) use(ctx context.Context) {
	if x.sure == nil {
		x.flushed()
	}
	for range x.r.IntN(12) {
		if x.w.dead || x.broken {
			return
		}
		switch x.r.IntN(12) {
		case 0:
			x.sync(ctx)
		case 1:
			x.copyPart("copy of an open part")
		case 2, 3:
			x.store()
		case 5:
			x.flushFails(ctx)
		case 4:
			if x.queue && x.m.Drain(ctx) == nil {
				x.allHave()
			}
		default:
			x.persist()
		}
	}
}

func (x *simRun) allHave() {
	for _, name := range x.replicas() {
		x.has[name] = len(x.events)
	}
}

// store changes a range of the memory.
func (x *simRun) store() (at, n int) {
	n = 1 + x.r.IntN(40)
	if x.chance(6) {
		n = 1 + x.r.IntN(simWords/2)
	}
	at = x.r.IntN(simWords - n + 1)
	x.number++
	for i := at; i < at+n; i++ {
		binary.LittleEndian.PutUint64(x.m.Bytes()[8*i:], x.number)
		x.live[i] = x.number
		x.late[i] = append(x.late[i], x.number)
	}
	return at, n
}

// persist persists a range. Replicas may fail.
func (x *simRun) persist() {
	at, n := x.store()
	failing, f := "", fate{}
	if !x.queue && x.chance(8) {
		names := x.replicas()
		failing = names[x.r.IntN(len(names))]
		f = fate{half: x.chance(2), names: x.chance(3)}
		x.w.becomes(failing, &f)
	}
	err := x.m.Persist(uint64(8*at), uint64(8*n))
	x.w.becomes(failing, nil)
	x.note("persist %d at %d+%d, %s fails %+v: %v", x.number, at, n, failing, f, err)
	if err != nil && !errors.Is(err, ErrBehind) {
		x.fail("%v", err)
	}
	for i := at; i < at+n; i++ {
		x.sure[i] = x.live[i]
		delete(x.late, i)
	}
	x.events = append(x.events, simEvent{at, slices.Clone(x.live[at : at+n])})
	if x.queue {
		return
	}
	for _, name := range x.replicas() {
		switch {
		case name == failing && f.names && !x.marked[name]:
			x.gap[name] = true
		case name == failing || x.gap[name] || x.stuck[name]:
			x.marked[name], x.gap[name] = true, false
		}
		if !x.gap[name] && !x.marked[name] {
			x.has[name] = len(x.events)
		}
	}
	if (err == nil) != (failing == "" && len(x.stuck) == 0) {
		x.fail("Persist answers %v, and %q has failed, %v before", err, failing, x.stuck)
	}
	if x.w.pools[failing] == nil && failing != "" { // the mirror
		x.stuck[failing] = true
		if i := x.set.Info()[1]; i.Torn != x.marked[failing] {
			x.fail("%+v, and torn is %v", i, x.marked[failing])
		}
	}
}

// flushFails: the disk of the local part fails once. Nothing is persisted from then on.
func (x *simRun) flushFails(ctx context.Context) {
	if !x.w.durable || !x.chance(3) {
		return
	}
	x.broken = true
	at, n := x.store()
	x.w.becomes(x.set.Part.Path, &fate{flush: true})
	for range 2 {
		err := x.m.Persist(uint64(8*at), uint64(8*n))
		x.note("persist %d at %d+%d, the disk fails: %v", x.number, at, n, err)
		if !errors.Is(err, client.ErrUnknown) {
			x.fail("%v", err)
		}
		x.w.becomes(x.set.Part.Path, nil)
	}
	if x.chance(2) {
		x.sync(ctx) // which writes all again
	}
}

func (x *simRun) sync(ctx context.Context) {
	if x.chance(3) {
		x.w.fuse = x.r.IntN(12)
	}
	_, err := x.m.Sync(ctx, nil)
	x.note("sync: %v", err)
	x.w.fuse = -1
	if x.w.dead {
		x.settled = false
		return
	}
	x.must(err)
	x.flushed()
	x.opened()
}

// end closes the memory or kills the program.
func (x *simRun) end(ctx context.Context) {
	switch {
	case x.w.dead:
	case x.chance(3):
		if x.chance(2) {
			x.w.fuse = x.r.IntN(12)
		}
		err := x.m.Close(ctx)
		if x.closed = true; err == nil && x.queue { // it may have been killed behind its last step
			x.allHave()
		}
		x.note("close: %v", err)
	default:
		x.kill()
	}
	cut := x.w.dead && x.chance(3) || x.chance(10)
	_ = x.m.Close(ctx) // lets the files of a process that was killed go
	x.m = nil
	x.must(x.w.again())
	if cut {
		x.powerFails(ctx)
	}
	if x.chance(4) {
		x.copyPart("copy behind the end")
	}
}

// kill kills the program in a Persist, or while a queue is sent.
func (x *simRun) kill() {
	if x.chance(2) {
		at, n := x.store()
		if x.queue {
			f := fate{left: x.r.IntN(3), half: x.chance(2)}
			for _, name := range x.replicas() {
				x.w.becomes(name, &f)
			}
		} else {
			for _, name := range x.replicas() {
				if k := x.r.IntN(3); k < 2 {
					x.w.becomes(name, &fate{half: k == 0, names: true}) // as if killed before the answer
				} else if x.gap[name] {
					x.marked[name], x.gap[name] = true, false
				}
			}
		}
		_ = x.m.Persist(uint64(8*at), uint64(8*n))
		x.events = append(x.events, simEvent{at, slices.Clone(x.live[at : at+n])})
		x.note("killed in persist %d at %d+%d", x.number, at, n)
	}
	x.w.mu.Lock()
	x.w.kill()
	x.w.mu.Unlock()
	x.note("killed")
}

func (x *simRun) powerFails(ctx context.Context) {
	x.must(x.w.powerFails())
	x.note("power fails")
	if !x.w.durable {
		x.outlive(ctx, false)
		return
	}
	if x.broken {
		defer x.outlive(ctx, true)
	}
	b, err := os.ReadFile(x.set.Part.Path)
	x.must(err)
	now := wordsOf(b[HeaderBytes:])
	for i, v := range now {
		if v != x.sure[i] && !slices.Contains(x.late[i], v) {
			x.fail("word %d is %d behind a loss of power: %d was persisted, %v stored since", i, v, x.sure[i], x.late[i])
		}
	}
	x.live = now
	x.flushed()
}

// outlive opens a set whose local part may not have survived a loss of power: it is refused, or it is as the replicas are, or has all.
func (x *simRun) outlive(ctx context.Context, hasAll bool) {
	before := map[string][]uint64{}
	for _, name := range x.replicas() {
		before[name] = slices.Clone(x.content(name))
	}
	m, err := x.set.open(ctx, x.w.world, x.options(), nil)
	if err == nil {
		for name, was := range before {
			if !hasAll && !slices.Equal(was, wordsOf(m.Bytes())) {
				x.fail("a part that has lost flushed bytes has changed %s", name)
			}
		}
		x.live = wordsOf(m.Bytes())
		x.must(m.Close(ctx))
		return
	}
	x.note("open: %v", err)
	if !errors.Is(err, ErrMismatch) && !errors.Is(err, ErrNotPart) && !errors.Is(err, ErrUnfinished) {
		x.fail("behind a loss of power: %v", err)
	}
	x.must(x.w.again())
	x.must(os.Remove(x.set.Part.Path))
	from := ""
	if names := x.sound(); !x.settled || len(names) == 0 {
		from = x.set.Pools[0] // as somebody has chosen
	}
	_, err = x.set.restore(ctx, x.w.world, from, nil)
	x.must(err)
	x.isRestored(from)
}

// sound are the replicas that are not torn.
func (x *simRun) sound() []string {
	return slices.DeleteFunc(x.replicas(), func(name string) bool { return x.marked[name] })
}

// isRestored checks what Restore has made.
func (x *simRun) isRestored(from string) {
	b, err := os.ReadFile(x.set.Part.Path)
	x.must(err)
	got := wordsOf(b[HeaderBytes:])
	least := len(x.events)
	for _, name := range x.sound() {
		least = min(least, x.has[name])
	}
	if from == "" && x.settled && len(x.sound()) == 0 {
		x.fail("restored, and no replica is sound")
	}
	if from == "" && !slices.Equal(got, x.live) && !x.isMoment(got, least) {
		x.fail("what is restored is no moment of the memory behind persist %d of %d since Open", least, len(x.events))
	}
	x.live = got
	x.flushed()
}

// copyPart has a copy of the local part, which may be put in its place later.
func (x *simRun) copyPart(what string) {
	b, err := os.ReadFile(x.set.Part.Path)
	x.must(err)
	x.number++
	path := filepath.Join(x.w.dir, "copies", fmt.Sprint(x.number))
	x.must(os.WriteFile(path, b, 0o600))
	x.copies = append(x.copies, path)
	x.note("%s: %d", what, x.number)
}

// disturb changes what there is between two programs.
func (x *simRun) disturb(ctx context.Context) {
	switch x.r.IntN(5) {
	case 0:
		x.losePart(ctx)
	case 1, 2:
		if len(x.copies) > 0 {
			x.swap(ctx)
		}
	case 3:
		x.loseReplica(ctx)
	}
}

// losePart restores a local part that was lost.
func (x *simRun) losePart(ctx context.Context) {
	aside := filepath.Join(x.w.dir, "copies", "aside")
	x.must(os.Rename(x.set.Part.Path, aside))
	back := func() { x.must(os.Rename(aside, x.set.Part.Path)) }
	if x.chance(3) {
		x.w.fuse = x.r.IntN(14)
	}
	_, err := x.set.restore(ctx, x.w.world, "", nil)
	killed := x.w.dead
	x.must(x.w.again())
	x.note("restore: %v", err)
	if killed && inode(x.set.Part.Path) == 0 { // or else it is whole
		_, err = x.set.restore(ctx, x.w.world, "", nil)
		x.must(x.w.again())
		x.note("restore again: %v", err)
	} else if killed {
		err = nil
	}
	if err != nil {
		if !errors.Is(err, ErrTorn) && (x.settled || !errors.Is(err, ErrMismatch)) || x.settled && len(x.sound()) > 0 {
			x.fail("restore: %v, and %v are sound", err, x.sound())
		}
		back()
		return
	}
	before := x.live
	x.isRestored("")
	if x.chance(3) { // the lost one is found again
		x.number++
		path := filepath.Join(x.w.dir, "copies", fmt.Sprint(x.number))
		x.must(os.Rename(x.set.Part.Path, path))
		x.copies = append(x.copies, path)
		x.note("kept as %d, and the former part put back", x.number)
		back()
		x.live = before
		x.flushed()
		return
	}
	x.number++
	x.copies = append(x.copies, aside+fmt.Sprint(x.number))
	x.must(os.Rename(aside, aside+fmt.Sprint(x.number)))
}

// isMoment says whether a memory is that of the replicas behind one of the ranges, and has the next one in part.
func (x *simRun) isMoment(got []uint64, least int) bool {
	return slices.ContainsFunc(x.bases, func(base []uint64) bool { return x.isMomentOf(base, got, least) })
}

func (x *simRun) isMomentOf(base, got []uint64, least int) bool {
	m := slices.Clone(base)
	for i := 0; ; i++ {
		if i >= least {
			var next simEvent
			if i < len(x.events) {
				next = x.events[i]
			}
			fits := true
			for w, v := range got {
				if v != m[w] && !(w >= next.at && w < next.at+len(next.words) && v == next.words[w-next.at]) {
					fits = false
					break
				}
			}
			if fits {
				return true
			}
		}
		if i == len(x.events) {
			return false
		}
		copy(m[x.events[i].at:], x.events[i].words)
	}
}

// swap opens the set with a copy of its local part.
func (x *simRun) swap(ctx context.Context) {
	i := x.r.IntN(len(x.copies))
	path := x.copies[i]
	x.note("swap in %s", filepath.Base(path))
	aside := filepath.Join(x.w.dir, "copies", "true")
	x.must(os.Rename(x.set.Part.Path, aside))
	x.must(os.Rename(path, x.set.Part.Path))
	b, err := os.ReadFile(x.set.Part.Path)
	x.must(err)
	before := map[string][]uint64{}
	for _, name := range x.replicas() {
		before[name] = slices.Clone(x.content(name))
	}
	m, err := x.set.open(ctx, x.w.world, x.options(), nil)
	if err != nil {
		if !errors.Is(err, ErrMismatch) && (x.w.durable || !errors.Is(err, ErrNotPart)) {
			x.fail("a copy: %v", err)
		}
		x.must(x.w.again())
		x.must(os.Rename(x.set.Part.Path, path))
		x.must(os.Rename(aside, x.set.Part.Path))
		return
	}
	for name, was := range before {
		if copied := wordsOf(b[HeaderBytes:]); !slices.Equal(was, x.content(name)) || !slices.Equal(copied, was) && !slices.Equal(copied, x.live) {
			x.fail("a copy is taken for the memory, and %s is another one", name)
		}
	}
	x.copies[i] = path + "t"
	x.must(os.Rename(aside, x.copies[i]))
	x.m = m
	x.opened()
	x.flushed()
}

// loseReplica has a replica made again.
func (x *simRun) loseReplica(ctx context.Context) {
	names := x.replicas()
	if len(names) == 1 {
		return
	}
	name := names[x.r.IntN(len(names))]
	x.note("%s is lost", name)
	if x.w.pools[name] == nil {
		x.must(os.Remove(name))
	}
	delete(x.w.pools, name)
	_, err := x.set.open(ctx, x.w.world, x.options(), nil)
	if err == nil {
		x.fail("opened without %s", name)
	}
	x.must(x.w.again())
	x.marked[name] = true // it is none for Restore before it has everything
	for dead := true; dead; {
		if x.w.fuse = -1; x.chance(2) {
			x.w.fuse = x.r.IntN(20)
		}
		_, err := x.set.sync(ctx, x.w.world, Options{}, nil)
		dead = x.w.dead
		x.must(x.w.again())
		x.note("sync of the set: %v", err)
		if err == nil {
			return
		}
		if x.settled = false; x.chance(2) {
			if x.content(name) != nil {
				x.losePart(ctx)
			}
		}
	}
}

// start opens the set, which may be killed meanwhile.
func (x *simRun) start(ctx context.Context, tries int) {
	if x.chance(2) {
		x.w.fuse = x.r.IntN(16)
	}
	before := x.live
	m, err := x.set.open(ctx, x.w.world, x.options(), nil)
	x.w.fuse = -1
	x.note("open: %v", err)
	switch {
	case err == nil && !x.w.dead:
		x.m = m
		if got := wordsOf(m.Bytes()); !slices.Equal(got, before) {
			x.fail("the memory is not what it was")
		}
		x.opened()
		x.flushed()
		return
	case x.w.dead:
		x.settled = false
		x.must(x.w.again())
	case errors.Is(err, client.ErrNoName), errors.Is(err, ErrNoPart), errors.Is(err, ErrUnfinished):
		_, err := x.set.sync(ctx, x.w.world, Options{}, nil)
		x.must(err)
	default:
		x.fail("open: %v", err)
	}
	switch x.r.IntN(6) {
	case 0:
		x.copyPart("copy behind a failed Open")
	case 1:
		x.losePart(ctx)
	}
}
