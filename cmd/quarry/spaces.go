package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
)

type spaceCmd struct {
	Create spaceCreateCmd `cmd:"" help:"Make a space: a range of virtual addresses in the memory of storage nodes."`
	List   spaceListCmd   `cmd:"" help:"List spaces."`
	Stat   spaceStatCmd   `cmd:"" help:"Describe a space, or say where an address of it lies."`
	Read   spaceReadCmd   `cmd:"" help:"Print bytes of a space."`
	Write  spaceWriteCmd  `cmd:"" help:"Write bytes into a space."`
	Copy   spaceCopyCmd   `cmd:"" name:"cp" help:"Copy a file into a space, or bytes of a space into a file or another space."`
	Grow   spaceGrowCmd   `cmd:"" help:"Add regions behind the last address of a space."`
	Remove spaceRemoveCmd `cmd:"" name:"rm" help:"Remove a space with what it holds."`
}

// address is a virtual address, or, with a plus sign, the distance from the base of the space.
type address string

// UnmarshalText is called by the parser.
func (v *address) UnmarshalText(b []byte) error {
	*v = address(b)
	_, err := v.in(0)
	return err
}

// in is the address in a space that begins at base.
func (v address) in(base uint64) (uint64, error) {
	text, relative := strings.CutPrefix(string(v), "+")
	n, err := strconv.ParseUint(text, 0, 64)
	if err != nil {
		return 0, fmt.Errorf("address %q: want 0xADDRESS, or +OFFSET from the base of the space", string(v))
	}
	if relative && n > math.MaxUint64-base {
		return 0, fmt.Errorf("address %q: %w", string(v), space.ErrAddress)
	}
	if relative {
		n += base
	}
	return n, nil
}

// inSpace refuses a range that does not lie in a space, before any of it is moved.
func inSpace(s *space.Space, va, n uint64) error {
	if base, size := s.Base(), s.Bytes(); va < base || va-base > size || n > size-(va-base) {
		return fmt.Errorf("%w: %d bytes at %#x, space %q has %#x to %#x", space.ErrAddress, n, va, s.Info().Name, base, base+size)
	}
	return nil
}

// onSpace opens a space for a command.
func (a *app) onSpace(ctx context.Context, name string, change func(*client.Config), f func(ctx context.Context, s *space.Space) error) error {
	return a.with(ctx, change, func(ctx context.Context, c *client.Client) error {
		s, err := space.Open(ctx, c, name)
		if err != nil {
			return err
		}
		return f(ctx, s)
	})
}

// printSpaces prints spaces as lines, or v as JSON.
func (a *app) printSpaces(list []space.Info, v any) error {
	return a.print(v, func(w io.Writer) {
		fmt.Fprintln(w, "SPACE\tBASE\tSIZE\tREGIONS\tREPLICAS")
		for _, s := range list {
			size := bytesText(s.Bytes)
			if s.Durable {
				size += " durable"
			}
			fmt.Fprintf(w, "%s\t%#x\t%s\t%d of %s\t%d\n", s.Name, s.Base, size, s.Regions, bytesText(s.RegionBytes), s.Replicas)
		}
	})
}

type spaceCreateCmd struct {
	Name     string   `arg:"" help:"1 to 255 bytes of text."`
	Size     sizeFlag `arg:"" help:"Bytes, such as 8GiB; rounded up to whole regions."`
	Region   sizeFlag `placeholder:"SIZE" help:"Bytes of each region: whole MiB up to 2GiB. Default: 2GiB, or the size of the space if that is less."`
	Base     uint64   `placeholder:"ADDRESS" help:"First address: a multiple of 2GiB from 0x100000000000 on. Default: behind the other spaces, with room to grow."`
	Replicas int      `short:"r" placeholder:"N" help:"Replicas, each in another failure domain: 1 to 3; default is the cluster's."`
	Durable  bool     `help:"Writes survive a power failure of all nodes: only on nodes with persistent memory or disks."`
}

func (s *spaceCreateCmd) Run(ctx context.Context, a *app) error {
	return a.with(ctx, nil, func(ctx context.Context, c *client.Client) error {
		made, err := space.Create(ctx, c, s.Name, uint64(s.Size), space.Options{Base: s.Base, RegionBytes: uint64(s.Region), Replicas: s.Replicas, Durable: s.Durable})
		if err != nil {
			return err
		}
		return a.printSpaces([]space.Info{made.Info()}, made.Info())
	})
}

type spaceListCmd struct{}

func (*spaceListCmd) Run(ctx context.Context, a *app) error {
	return a.with(ctx, readOnly, func(ctx context.Context, c *client.Client) error {
		list, err := space.List(ctx, c)
		if err != nil {
			return err
		}
		if list == nil {
			list = []space.Info{}
		}
		return a.printSpaces(list, list)
	})
}

type spaceStatCmd struct {
	Name    string   `arg:"" complete:"space" help:"Of the space."`
	Address *address `arg:"" optional:"" help:"0xADDRESS, or +OFFSET from the base: print where this byte lies."`
}

func (s *spaceStatCmd) Run(ctx context.Context, a *app) error {
	return a.onSpace(ctx, s.Name, readOnly, func(ctx context.Context, sp *space.Space) error {
		if s.Address == nil {
			return a.printSpaces([]space.Info{sp.Info()}, sp.Info())
		}
		va, err := s.Address.in(sp.Base())
		if err != nil {
			return usageError{err}
		}
		// A byte is read, so that it is known over which provider its node is reached.
		if _, err := sp.Read(ctx, make([]byte, 1), va); err != nil {
			return err
		}
		p, err := sp.Resolve(ctx, va)
		if err != nil {
			return err
		}
		return a.print(p, func(w io.Writer) {
			fmt.Fprintf(w, "address\t%#x\nregion\t%d\noffset\t%#x\nnode\t%s\nprovider\t%s\n", p.Address, p.Region, p.Offset, p.Node, p.Provider)
		})
	})
}

type spaceReadCmd struct {
	Name    string   `arg:"" complete:"space" help:"Of the space."`
	Address address  `arg:"" help:"0xADDRESS, or +OFFSET from the base."`
	Bytes   sizeFlag `arg:"" help:"How many, such as 100 or 4KiB."`
}

func (s *spaceReadCmd) Run(ctx context.Context, a *app) error {
	return a.onSpace(ctx, s.Name, readOnly, func(ctx context.Context, sp *space.Space) error {
		va, err := s.Address.in(sp.Base())
		if err != nil {
			return usageError{err}
		}
		if err := inSpace(sp, va, uint64(s.Bytes)); err != nil {
			return err
		}
		_, err = a.moveBytes(ctx, "read", uint64(s.Bytes), spaceReader{ctx, sp, va}, a.out)
		return err
	})
}

type spaceWriteCmd struct {
	Name    string  `arg:"" complete:"space" help:"Of the space."`
	Address address `arg:"" help:"0xADDRESS, or +OFFSET from the base."`
	payloadFlags
}

func (s *spaceWriteCmd) Run(ctx context.Context, a *app) error {
	b, err := s.read(a)
	if err != nil {
		return err
	}
	return a.onSpace(ctx, s.Name, nil, func(ctx context.Context, sp *space.Space) error {
		va, err := s.Address.in(sp.Base())
		if err != nil {
			return usageError{err}
		}
		n, err := sp.Write(ctx, b, va)
		if err != nil {
			return fmt.Errorf("%d of %d bytes are written: %w", n, len(b), err)
		}
		return a.print(map[string]any{"bytes": n, "address": va}, func(w io.Writer) { fmt.Fprintf(w, "%d bytes at %#x\n", n, va) })
	})
}

type spaceCopyCmd struct {
	From  string   `arg:"" help:"File, or SPACE:ADDRESS with 0xADDRESS or +OFFSET."`
	To    string   `arg:"" help:"File, or SPACE:ADDRESS."`
	Bytes sizeFlag `placeholder:"SIZE" help:"How many. Default: to the end of the file or space that is copied."`
}

// end is one side of a copy.
type end struct {
	file  string
	space string
	at    address
}

// endOf reads SPACE:ADDRESS; what has no address is a file.
func endOf(text string) end {
	if i := strings.LastIndexByte(text, ':'); i > 0 {
		if at := address(text[i+1:]); at != "" {
			if _, err := at.in(0); err == nil {
				return end{space: text[:i], at: at}
			}
		}
	}
	return end{file: text}
}

func (s *spaceCopyCmd) Run(ctx context.Context, a *app) error {
	from, to := endOf(s.From), endOf(s.To)
	if from.space == "" && to.space == "" {
		return usagef("%s and %s are files: want one of them as SPACE:ADDRESS", s.From, s.To)
	}
	mode := readOnly
	if to.space != "" {
		mode = nil
	}
	return a.with(ctx, mode, func(ctx context.Context, c *client.Client) error {
		r, total, done, err := from.reader(ctx, c, uint64(s.Bytes))
		if err != nil {
			return err
		}
		defer done()
		w, finish, err := to.writer(ctx, c, total)
		if err != nil {
			return err
		}
		n, err := a.moveBytes(ctx, "copy", total, r, w)
		switch err = finish(err); {
		case err != nil && to.space == "":
			return fmt.Errorf("%s is as it was before: %w", to.file, err)
		case err != nil:
			return fmt.Errorf("%d of %d bytes are copied: %w", n, total, err)
		}
		return a.print(map[string]any{"bytes": n}, func(w io.Writer) { fmt.Fprintf(w, "%d bytes\n", n) })
	})
}

// reader opens the side that is copied from; total is how many bytes there are to copy, at most most unless that is 0.
func (e end) reader(ctx context.Context, c *client.Client, most uint64) (r io.Reader, total uint64, done func(), err error) {
	if e.space == "" {
		f, err := os.Open(e.file)
		if err != nil {
			return nil, 0, nil, usageError{err}
		}
		st, err := f.Stat()
		if err == nil && !st.Mode().IsRegular() {
			err = usagef("%s is not a regular file", e.file)
		}
		if err != nil {
			f.Close()
			return nil, 0, nil, err
		}
		total, done, r = uint64(st.Size()), func() { f.Close() }, f
		if most > total {
			f.Close()
			return nil, 0, nil, usagef("%s has %d bytes: --bytes %d is more", e.file, total, most)
		}
	} else {
		s, va, err := e.open(ctx, c)
		if err != nil {
			return nil, 0, nil, err
		}
		if err := inSpace(s, va, max(most, 1)); err != nil {
			return nil, 0, nil, err
		}
		total, done, r = s.Base()+s.Bytes()-va, func() {}, spaceReader{ctx, s, va}
	}
	if most > 0 {
		total = most
	}
	return r, total, done, nil
}

// writer opens the side that total bytes are copied to. finish ends the copy with the error that it has had so far.
func (e end) writer(ctx context.Context, c *client.Client, total uint64) (w io.Writer, finish func(error) error, err error) {
	if e.space == "" {
		return e.create()
	}
	s, va, err := e.open(ctx, c)
	if err == nil {
		err = inSpace(s, va, total)
	}
	if err != nil {
		return nil, nil, err
	}
	return &spaceWriter{ctx, s, va}, func(err error) error { return err }, nil
}

// create makes a file under another name, which takes the place of the old one when it is whole.
func (e end) create() (w io.Writer, finish func(error) error, err error) {
	old, statErr := os.Stat(e.file)
	if statErr == nil && !old.Mode().IsRegular() {
		return nil, nil, usagef("%s is not a regular file", e.file)
	}
	f, err := os.CreateTemp(filepath.Dir(e.file), "."+filepath.Base(e.file)+".*")
	if err != nil {
		return nil, nil, usagef("copy: %w", err)
	}
	return f, func(err error) error {
		defer os.Remove(f.Name())
		if statErr == nil {
			err = errors.Join(err, f.Chmod(old.Mode().Perm()))
		}
		if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
			err = os.Rename(f.Name(), e.file)
		}
		return err
	}, nil
}

// open opens the space of a side.
func (e end) open(ctx context.Context, c *client.Client) (*space.Space, uint64, error) {
	s, err := space.Open(ctx, c, e.space)
	if err != nil {
		return nil, 0, err
	}
	va, err := e.at.in(s.Base())
	return s, va, err
}

// spaceReader reads a space from an address on. moveBytes tells it how much.
type spaceReader struct {
	ctx context.Context
	s   *space.Space
	va  uint64
}

func (r spaceReader) ReadAt(p []byte, off int64) (int, error) {
	return r.s.Read(r.ctx, p, r.va+uint64(off))
}

// Read is never called: moveBytes reads at offsets.
func (r spaceReader) Read([]byte) (int, error) { return 0, errors.ErrUnsupported }

// spaceWriter writes a space from an address on.
type spaceWriter struct {
	ctx context.Context
	s   *space.Space
	va  uint64
}

func (w *spaceWriter) Write(p []byte) (int, error) {
	n, err := w.s.Write(w.ctx, p, w.va)
	w.va += uint64(n)
	return n, err
}

// moveBytes copies total bytes, in pieces of a round each, and shows progress. done is how many it has.
func (a *app) moveBytes(ctx context.Context, what string, total uint64, r io.Reader, w io.Writer) (done uint64, err error) {
	at, ok := r.(io.ReaderAt)
	if !ok {
		return 0, errors.ErrUnsupported
	}
	bar := a.progress(what)
	defer bar.end()
	buf := make([]byte, client.MaxRawBytes)
	for done < total {
		if err := ctx.Err(); err != nil {
			return done, err
		}
		p := buf[:min(uint64(len(buf)), total-done)]
		if _, err := at.ReadAt(p, int64(done)); err != nil {
			return done, err
		}
		n, err := w.Write(p)
		done += uint64(n)
		if err != nil {
			return done, err
		}
		bar.set(int(done>>10), int(total>>10))
	}
	return done, nil
}

type spaceGrowCmd struct {
	Name string   `arg:"" complete:"space" help:"Of the space."`
	Size sizeFlag `arg:"" help:"Bytes to add; rounded up to whole regions."`
}

func (s *spaceGrowCmd) Run(ctx context.Context, a *app) error {
	return a.onSpace(ctx, s.Name, nil, func(ctx context.Context, sp *space.Space) error {
		if err := sp.Grow(ctx, uint64(s.Size)); err != nil {
			return err
		}
		return a.printSpaces([]space.Info{sp.Info()}, sp.Info())
	})
}

type spaceRemoveCmd struct {
	Name string `arg:"" complete:"space" help:"Of the space."`
}

func (s *spaceRemoveCmd) Run(ctx context.Context, a *app) error {
	return a.with(ctx, nil, func(ctx context.Context, c *client.Client) error {
		if err := space.Delete(ctx, c, s.Name); err != nil {
			return err
		}
		return a.print(map[string]any{"removed": s.Name}, func(w io.Writer) { fmt.Fprintf(w, "space %s is removed\n", s.Name) })
	})
}
