package space

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/quarrystore/quarry/client"
)

const (
	// MaxRegionBytes is the size of the regions of a space, unless Options say less.
	MaxRegionBytes = 2 << 30
	unit           = 1 << 20 // regions are whole units
)

// ErrAddress: the address is not in the space. It is an client.ErrArgument, too.
var ErrAddress = fmt.Errorf("%w: address outside of the space", client.ErrArgument)

// ErrLost: the region of the address was lost for good. It is a client.ErrUnreachable, too.
var ErrLost = fmt.Errorf("%w: the region of the address was lost", client.ErrUnreachable)

// Options of a new space.
type Options struct {
	Base        uint64 // multiple of 2 GiB from 0x1000_0000_0000 on; 0: the controllers choose one with room to grow
	RegionBytes uint64 // of each region, whole MiB; 0: 2 GiB, or the space's size rounded up if that is less
	Replicas    int    // 0: as Config.Replicas, and the cluster's default
	Durable     bool   // writes survive a loss of power
}

// Space is an open space.
type Space struct {
	c      *client.Client
	name   string
	mu     sync.Mutex             // held while layout is replaced
	layout atomic.Pointer[layout] // as last read from the controllers
}

// layout is where the bytes of a space lie.
type layout struct {
	base, each uint64
	regions    []client.RawRegion // by index; ID 0 where there is none
}

// end is behind the last address.
func (l *layout) end() uint64 { return l.base + uint64(len(l.regions))*l.each }

// Create makes a space of at least so many bytes, all zero, in whole regions. client.ErrNameExists: there is one of the name.
// client.ErrNoSpace: no room in memory, or another space has addresses that are asked for. client.ErrUnknown: the space may be there, in
// part.
func Create(ctx context.Context, c *client.Client, name string, bytes uint64, o Options) (*Space, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	each := o.RegionBytes
	if each == 0 {
		each = min(MaxRegionBytes, (max(bytes, 1)+unit-1)/unit*unit)
	}
	if bytes == 0 || bytes > 1<<47 {
		return nil, fmt.Errorf("%w: a space of %d bytes", client.ErrArgument, bytes)
	}
	if each%unit != 0 || each > MaxRegionBytes {
		return nil, fmt.Errorf("%w: regions of %d bytes: want whole MiB up to 2 GiB", client.ErrArgument, each)
	}
	count := int((bytes + each - 1) / each)
	at := client.RawRegion{Space: name, Base: o.Base, DataBytes: each, Replicas: o.Replicas, Durable: o.Durable}
	if err := c.CreateRaw(ctx, at, min(count, client.MaxRawRegions), false); err != nil {
		return nil, err
	}
	s, err := Open(ctx, c, name)
	if err == nil && count > client.MaxRawRegions {
		err = s.Grow(ctx, uint64(count-client.MaxRawRegions)*each)
	}
	if err == nil {
		return s, nil
	}
	// A part of the space is not left. If that fails, it may be.
	if derr := Delete(ctx, c, name); derr != nil && !errors.Is(derr, client.ErrNoName) {
		err = fmt.Errorf("%w: space %q may be left, in part: delete it: %w", client.ErrUnknown, name, errors.Join(err, derr))
	}
	return nil, err
}

// Open opens a space. client.ErrNoName: there is none of the name.
func Open(ctx context.Context, c *client.Client, name string) (*Space, error) {
	s := &Space{c: c, name: name}
	return s, s.look(ctx)
}

// look reads where the space lies.
func (s *Space) look(ctx context.Context) error {
	if _, err := s.c.RawRegions(ctx, true); err != nil {
		return err
	}
	// Another look may have read a later table meanwhile. The Client's table is never an earlier one than before.
	s.mu.Lock()
	defer s.mu.Unlock()
	all, err := s.c.RawRegions(ctx, false)
	if err != nil {
		return err
	}
	l := layoutOf(all, s.name)
	if l == nil {
		return fmt.Errorf("%w: space %q", client.ErrNoName, s.name)
	}
	if old := s.layout.Load(); old != nil && !old.sameSpace(l) {
		return fmt.Errorf("%w: space %q was deleted, and another one has its name: open it again", client.ErrNoName, s.name)
	}
	s.layout.Store(l)
	return nil
}

// sameSpace says whether a later layout can be of the same space. Numbers of regions are not used again, so a space that was deleted and made again has
// other ones.
func (l *layout) sameSpace(later *layout) bool {
	if l.base != later.base || l.each != later.each {
		return false
	}
	for i := range min(len(l.regions), len(later.regions)) {
		if a, b := l.regions[i].ID, later.regions[i].ID; a != 0 && b != 0 {
			return a == b
		}
	}
	return true // no region is left to compare
}

// layoutOf is the layout of a space, nil if there is none.
func layoutOf(all []client.RawRegion, name string) *layout {
	var l *layout
	for _, r := range all {
		if r.Space != name {
			continue
		}
		if l == nil {
			l = &layout{base: r.Base, each: r.DataBytes}
		}
		for len(l.regions) < int(r.Index) {
			l.regions = append(l.regions, client.RawRegion{})
		}
		l.regions = append(l.regions, r)
	}
	return l
}

// Info describes a space.
type Info struct {
	Name        string `json:"name"`
	Base        uint64 `json:"base"`
	Bytes       uint64 `json:"bytes"`
	RegionBytes uint64 `json:"region_bytes"`
	Regions     int    `json:"regions"`
	Replicas    int    `json:"replicas"`
	Durable     bool   `json:"durable"`
}

// List lists the spaces of the client's tenant by name.
func List(ctx context.Context, c *client.Client) ([]Info, error) {
	all, err := c.RawRegions(ctx, true)
	if err != nil {
		return nil, err
	}
	var out []Info
	for i, r := range all {
		if i == 0 || all[i-1].Space != r.Space {
			out = append(out, layoutOf(all, r.Space).info(r.Space))
		}
	}
	return out, nil
}

func (l *layout) info(name string) Info {
	last := l.regions[len(l.regions)-1]
	return Info{name, l.base, l.end() - l.base, l.each, len(l.regions), last.Replicas, last.Durable}
}

// Delete removes a space. What it held is gone, and its addresses name nothing. client.ErrNoName: there is none of the name.
// client.ErrUnknown: all of it, or a part at its end, may be removed; call Delete again.
func Delete(ctx context.Context, c *client.Client, name string) error { return c.DeleteRaw(ctx, name) }

// Grow adds at least so many bytes, all zero, behind the last address, in whole regions. client.ErrNoSpace: no room in memory, or another space
// is in the way; then it may have grown by some of it. client.ErrBusy: another growth is under way. client.ErrUnknown: it may have grown, by some
// of it or all.
func (s *Space) Grow(ctx context.Context, bytes uint64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	each := s.layout.Load().each
	if bytes == 0 || bytes > 1<<47 {
		return fmt.Errorf("%w: growth by %d bytes", client.ErrArgument, bytes)
	}
	count := int((bytes + each - 1) / each)
	for left := count; left > 0; left -= client.MaxRawRegions {
		err := s.c.CreateRaw(ctx, client.RawRegion{Space: s.name}, min(left, client.MaxRawRegions), true)
		if err != nil && left < count && !errors.Is(err, client.ErrNoSpace) {
			err = fmt.Errorf("%w: space %q has grown by %d of %d regions: %w", client.ErrUnknown, s.name, count-left, count, err)
		}
		if err != nil {
			return err
		}
	}
	_ = s.look(ctx) // it has grown: calls at the new addresses look again
	return nil
}

// Info describes the space as it was when it was opened, or has grown since as far as this Space has noticed.
func (s *Space) Info() Info { return s.layout.Load().info(s.name) }

// Base is the space's first address.
func (s *Space) Base() uint64 { return s.layout.Load().base }

// Bytes is the size of the space; see Info.
func (s *Space) Bytes() uint64 { l := s.layout.Load(); return l.end() - l.base }

// Place is where a byte lies.
type Place struct {
	Address  uint64 `json:"address"`
	Region   uint32 `json:"region"`
	Offset   uint64 `json:"offset"` // in the region's data
	Node     string `json:"node"`   // with the primary
	Provider string `json:"provider"`
}

// Resolve says where the byte at an address lies now.
func (s *Space) Resolve(ctx context.Context, va uint64) (Place, error) {
	if err := s.look(ctx); err != nil {
		return Place{}, err
	}
	r, off, err := s.find(ctx, va, 1)
	return Place{va, r.ID, off, s.c.NodeName(r.Node), r.Provider}, err
}

// find is the region and the offset of an address, with n bytes behind it in the space. It looks the space up again if that is behind its end.
func (s *Space) find(ctx context.Context, va, n uint64) (client.RawRegion, uint64, error) {
	l := s.layout.Load()
	if va >= l.base && (va > l.end() || n > l.end()-va) {
		if err := s.look(ctx); err != nil {
			return client.RawRegion{}, 0, err
		}
		l = s.layout.Load()
	}
	if va < l.base || va >= l.end() || n > l.end()-va {
		return client.RawRegion{}, 0, fmt.Errorf("%w: %d bytes at %#x, space %q has %#x to %#x", ErrAddress, n, va, s.name, l.base, l.end())
	}
	r := l.regions[(va-l.base)/l.each]
	if r.ID == 0 {
		return r, 0, fmt.Errorf("%w: %#x in space %q", ErrLost, va, s.name)
	}
	return r, (va - l.base) % l.each, nil
}

// pieceLists are lists for calls, which use them again.
var pieceLists = sync.Pool{New: func() any { return new([]client.RawPiece) }}

// pieces appends a range to out, cut at the borders of regions.
// Preconditions: the range is in the space.
func (s *Space) pieces(ctx context.Context, out []client.RawPiece, p []byte, va uint64) ([]client.RawPiece, error) {
	for len(p) > 0 {
		r, off, err := s.find(ctx, va, 1)
		if err != nil {
			return nil, err
		}
		n := min(uint64(len(p)), r.DataBytes-off)
		out = append(out, client.RawPiece{Region: r.ID, Off: off, Buf: p[:n]})
		p, va = p[n:], va+n
	}
	return out, nil
}

// each runs f over a range in parts of at most client.MaxRawBytes: one round for the pieces of a part. done is how much of it was done.
func (s *Space) each(ctx context.Context, p []byte, va uint64, f func([]client.RawPiece) error) (done int, err error) {
	if err := ctx.Err(); err != nil || len(p) == 0 {
		return 0, err
	}
	if _, _, err := s.find(ctx, va, uint64(len(p))); err != nil {
		return 0, err
	}
	list := pieceLists.Get().(*[]client.RawPiece)
	defer pieceLists.Put(list)
	for done < len(p) {
		part := p[done:min(len(p), done+client.MaxRawBytes)]
		*list, err = s.pieces(ctx, (*list)[:0], part, va+uint64(done))
		if err == nil {
			err = f(*list)
		}
		clear(*list)
		if err != nil {
			return done, err
		}
		done += len(part)
	}
	return done, nil
}

// Read reads the bytes from an address on.
func (s *Space) Read(ctx context.Context, p []byte, va uint64) (n int, err error) {
	return s.each(ctx, p, va, func(list []client.RawPiece) error { return s.c.ReadRaw(ctx, list) })
}

// Write writes bytes from an address on. nil: they are at every replica. client.ErrUnknown: bytes behind the first n may have been written.
func (s *Space) Write(ctx context.Context, p []byte, va uint64) (n int, err error) {
	return s.each(ctx, p, va, func(list []client.RawPiece) error { return s.c.WriteRaw(ctx, list) })
}

// ReadAt is Read as io.ReaderAt: va is the address. Behind the end of the space is io.EOF.
func (s *Space) ReadAt(p []byte, va int64) (n int, err error) {
	ctx := context.Background()
	n, err = s.Read(ctx, p, uint64(va))
	if l := s.layout.Load(); errors.Is(err, ErrAddress) && n == 0 && va >= 0 && uint64(va) >= l.base {
		if left := l.end() - min(uint64(va), l.end()); left < uint64(len(p)) {
			if n, err = s.Read(ctx, p[:left], uint64(va)); err == nil {
				err = io.EOF
			}
		}
	}
	return n, err
}

// WriteAt is Write as io.WriterAt: va is the address. It does not make the space larger.
func (s *Space) WriteAt(p []byte, va int64) (n int, err error) {
	return s.Write(context.Background(), p, uint64(va))
}

// word finds the word at an address, which is a multiple of 8.
func (s *Space) word(ctx context.Context, va uint64) (region uint32, off uint64, err error) {
	if err := ctx.Err(); err != nil {
		return 0, 0, err
	}
	if va%8 != 0 {
		return 0, 0, fmt.Errorf("%w: word at %#x: not a multiple of 8", client.ErrArgument, va)
	}
	r, off, err := s.find(ctx, va, 8)
	return r.ID, off, err
}

// Load64 reads a word, little endian.
func (s *Space) Load64(ctx context.Context, va uint64) (uint64, error) {
	r, off, err := s.word(ctx, va)
	if err != nil {
		return 0, err
	}
	return s.c.LoadRaw(ctx, r, off)
}

// Store64 sets a word.
func (s *Space) Store64(ctx context.Context, va, value uint64) error {
	r, off, err := s.word(ctx, va)
	if err != nil {
		return err
	}
	return s.c.StoreRaw(ctx, r, off, value)
}

// CAS64 sets a word to value if it is expect. It returns what the word was, and whether it was set. client.ErrUnknown: it may have been, once.
func (s *Space) CAS64(ctx context.Context, va, expect, value uint64) (old uint64, swapped bool, err error) {
	r, off, err := s.word(ctx, va)
	if err != nil {
		return 0, false, err
	}
	old, err = s.c.SwapRaw(ctx, r, off, expect, value)
	return old, err == nil && old == expect, err
}

// Add64 adds to a word, modulo 2^64, and returns what it was. client.ErrUnknown: it may have been added, once.
func (s *Space) Add64(ctx context.Context, va, addend uint64) (old uint64, err error) {
	r, off, err := s.word(ctx, va)
	if err != nil {
		return 0, err
	}
	return s.c.AddRaw(ctx, r, off, addend)
}

// Flush returns when n bytes from an address on are on stable storage at every replica of a durable space. Writes of this package are
// when they return; Flush is for bytes that were written otherwise. In other spaces it does nothing.
func (s *Space) Flush(ctx context.Context, va, n uint64) error {
	if err := ctx.Err(); err != nil || n == 0 {
		return err
	}
	if _, _, err := s.find(ctx, va, n); err != nil {
		return err
	}
	for n > 0 {
		r, off, err := s.find(ctx, va, 1)
		if err != nil {
			return err
		}
		part := min(n, r.DataBytes-off)
		if err := s.c.FlushRaw(ctx, r.ID, off, part); err != nil {
			return err
		}
		n, va = n-part, va+part
	}
	return nil
}
