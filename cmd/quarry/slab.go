package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/proto"
)

type slabCmd struct {
	Alloc slabAllocCmd `cmd:"" help:"Make an object and print its reference."`
	Read  slabReadCmd  `cmd:"" help:"Print an object's payload."`
	Write slabWriteCmd `cmd:"" help:"Replace an object's payload."`
	Stat  slabStatCmd  `cmd:"" help:"Describe an object."`
	Free  slabFreeCmd  `cmd:"" help:"Free objects."`

	Restore slabRestoreCmd `cmd:"" help:"Give an object that is lost a payload again."`
	Discard slabDiscardCmd `cmd:"" help:"Give up objects that are lost, and use their slabs again."`

	List slabListCmd `cmd:"" help:"List objects by tag or owner, and free them, such as those that an interrupted program left."`
}

// payloadFlags say where a payload comes from.
type payloadFlags struct {
	File string  `arg:"" optional:"" help:"File with the payload; - or nothing means standard input."`
	Data *string `short:"d" placeholder:"TEXT" help:"The payload itself."`
}

// The payload from --data, a file, or standard input. One byte more than an object holds is read, which tells a
// payload that is too long from one that fits.
func (p *payloadFlags) read(a *app) ([]byte, error) {
	switch {
	case p.Data != nil && p.File != "":
		return nil, usagef("both --data and a file are given: want one of them")
	case p.Data != nil:
		return []byte(*p.Data), nil
	}
	r := a.in
	if p.File != "" && p.File != "-" {
		f, err := os.Open(p.File)
		if err != nil {
			return nil, usagef("payload: %w", err)
		}
		defer f.Close()
		r = f
	}
	b, err := io.ReadAll(io.LimitReader(r, client.MaxObjectBytes+1))
	if err != nil {
		return nil, fmt.Errorf("payload: %w", err)
	}
	if len(b) > client.MaxObjectBytes {
		return nil, fmt.Errorf("%w: the payload has more than %d bytes, the most an object holds", client.ErrTooLarge, client.MaxObjectBytes)
	}
	return b, nil
}

// target is an object: REGION:0xOFFSET/GENERATION.BORN, or @NAME.
type target string

func (t target) ref(ctx context.Context, c *client.Client) (client.Ref, error) {
	if name, ok := strings.CutPrefix(string(t), "@"); ok {
		n, err := c.Names().Lookup(ctx, name)
		if err == nil && n.Kind == client.BadKind {
			return client.Ref{}, usagef("the name %q is of a mark, not of an object: quarry slab restore, or quarry slab discard, takes it", name)
		}
		return n.Ref, err
	}
	return proto.ParseRef(string(t))
}

// UnmarshalText is called by the parser.
func (t *target) UnmarshalText(b []byte) error {
	*t = target(b)
	if string(b) == "@" {
		return errors.New("name is empty: want @NAME")
	}
	if len(b) > 0 && b[0] == '@' {
		return nil
	}
	_, err := proto.ParseRef(string(b))
	return err
}

type slabAllocCmd struct {
	payloadFlags
	Replicas  int      `short:"r" placeholder:"N" help:"Replicas of the object, each in another failure domain: 1 to 3; default is the cluster's."`
	Durable   bool     `help:"Acknowledged changes survive a power failure of all nodes. Uses only regions of nodes with persistent memory or disks."`
	WriteOnce bool     `help:"Cannot be updated; takes half the memory."`
	Slab      string   `enum:"pair,staged" default:"pair" help:"pair, or staged, which has one image instead of two: half the memory, slower updates; with one replica only."`
	Capacity  sizeFlag `placeholder:"SIZE" help:"Bytes to reserve for larger payloads later; default is what the payload needs."`
	Tag       uint32   `placeholder:"N" help:"What the object is for, a number of yours."`
	Name      string   `placeholder:"NAME" help:"Give it this name, too."`
}

// A name that cannot be given leaves no object behind: the object is freed again, and where that fails too the
// error names it.
func (s *slabAllocCmd) Run(ctx context.Context, a *app) error {
	b, err := s.read(a)
	if err != nil {
		return err
	}
	few := func(c *client.Config) {
		if s.Replicas >= 1 && s.Replicas <= client.MaxReplicas {
			c.Replicas = s.Replicas // a client that asks for few is warned
		}
	}
	kind := slabKind(s.Slab)
	switch {
	case s.WriteOnce && kind == client.StagedSlab:
		return usagef("--slab staged: an object with --write-once has one image anyway: leave one of them out")
	case s.WriteOnce:
		kind = 0
	}
	return a.with(ctx, few, func(ctx context.Context, c *client.Client) error {
		ref, err := c.Alloc(ctx, b, client.AllocOptions{WriteOnce: s.WriteOnce, Slab: kind, Tag: s.Tag, Capacity: int(s.Capacity), Replicas: s.Replicas, Durability: durability(s.Durable)})
		if err != nil {
			return err
		}
		if s.Name != "" {
			if _, err := c.Names().Create(ctx, s.Name, "object", ref); err != nil {
				if ferr := c.Free(ctx, ref); ferr != nil {
					return fmt.Errorf("%w; the object %v was left behind: %w", err, ref, ferr)
				}
				return err
			}
		}
		return a.print(map[string]any{"ref": ref, "bytes": len(b)}, func(w io.Writer) { fmt.Fprintln(w, ref) })
	})
}

// durability of what a command makes.
func durability(durable bool) client.Durability {
	if durable {
		return client.Durable
	}
	return client.Volatile
}

// slabKind is what --slab says.
func slabKind(flag string) client.SlabKind {
	return map[string]client.SlabKind{"pair": client.PairSlab, "staged": client.StagedSlab}[flag]
}

type slabReadCmd struct {
	Target target `arg:"" complete:"target" help:"REF or @NAME."`
	Out    string `short:"o" placeholder:"FILE" help:"Write the payload there."`
}

type objectView struct {
	Ref     client.Ref  `json:"ref"`
	Info    client.Info `json:"info"`
	Payload []byte      `json:"payload,omitempty"` // base64
}

func (s *slabReadCmd) Run(ctx context.Context, a *app) error {
	return a.with(ctx, readOnly, func(ctx context.Context, c *client.Client) error {
		ref, err := s.Target.ref(ctx, c)
		if err != nil {
			return err
		}
		b, info, err := c.ReadInfo(ctx, ref, nil)
		if err != nil {
			return about(ref, err)
		}
		if s.Out != "" {
			if err := os.WriteFile(s.Out, b, 0o600); err != nil {
				return err
			}
			return a.print(objectView{Ref: ref, Info: info}, func(w io.Writer) { fmt.Fprintf(w, "%d bytes in %s\n", len(b), s.Out) })
		}
		if a.cli.JSON {
			return a.print(objectView{ref, info, b}, nil)
		}
		if n := len(b); isTerminal(a.out) && n > 0 && b[n-1] != '\n' {
			b = append(b, '\n') // a prompt follows
		}
		_, err = a.out.Write(b)
		return err
	})
}

// readOnly opens a session that may only read. Where shm is asked for the session may write too: nodes
// refuse shm to read-only sessions of their own user.
func readOnly(c *client.Config) { c.ReadOnly = c.Transport != client.TransportSHM }

type slabStatCmd struct {
	Target target `arg:"" complete:"target" help:"REF or @NAME."`
}

func (s *slabStatCmd) Run(ctx context.Context, a *app) error {
	return a.with(ctx, readOnly, func(ctx context.Context, c *client.Client) error {
		ref, err := s.Target.ref(ctx, c)
		if err != nil {
			return err
		}
		i, err := c.Stat(ctx, ref)
		if err != nil {
			return about(ref, err)
		}
		return a.print(objectView{Ref: ref, Info: i}, func(w io.Writer) {
			fmt.Fprintf(w, "ref\t%v\nbytes\t%d\nversion\t%d\nborn\t%d\ntag\t%d\nchunks\t%d\nslab\t%v\nwrite once\t%v\n", ref, i.Bytes, i.Version, i.Born, i.Tag, i.Chunks, i.Slab, i.WriteOnce)
		})
	})
}

type slabWriteCmd struct {
	Target target `arg:"" complete:"target" help:"REF or @NAME."`
	payloadFlags
	IfVersion uint64 `placeholder:"N" help:"Only if the object is at this version; see slab stat."`
}

func (s *slabWriteCmd) Run(ctx context.Context, a *app) error {
	b, err := s.read(a)
	if err != nil {
		return err
	}
	return a.with(ctx, nil, func(ctx context.Context, c *client.Client) error {
		ref, err := s.Target.ref(ctx, c)
		if err != nil {
			return err
		}
		if s.IfVersion != 0 {
			err = c.CompareAndWrite(ctx, ref, s.IfVersion, b)
		} else {
			err = c.Write(ctx, ref, b)
		}
		if err != nil {
			return about(ref, err)
		}
		return a.print(map[string]any{"ref": ref, "bytes": len(b)}, func(io.Writer) {})
	})
}

type slabFreeCmd struct {
	Targets []target `arg:"" complete:"target" name:"target" help:"REFs or @NAMEs; names are deleted, too."`
}

func (s *slabFreeCmd) Run(ctx context.Context, a *app) error {
	freed := []client.Ref{}
	err := a.with(ctx, nil, func(ctx context.Context, c *client.Client) error {
		for _, t := range s.Targets {
			ref, err := t.ref(ctx, c)
			if err != nil {
				return err
			}
			// The name goes first: it must never point at what is no longer there.
			if name, ok := strings.CutPrefix(string(t), "@"); ok {
				if err := c.Names().Delete(ctx, name, 0); err != nil {
					return err
				}
			}
			if err := c.Free(ctx, ref); err != nil {
				return about(ref, err)
			}
			freed = append(freed, ref)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return a.print(map[string]any{"freed": freed}, func(io.Writer) {})
}

// mark is the reference of a mark, as fsck --bad shows it, or @bad/ADDRESS.
type mark string

func (m mark) ref(ctx context.Context, c *client.Client) (client.Ref, error) {
	name, ok := strings.CutPrefix(string(m), "@")
	if !ok {
		return proto.ParseRef(string(m))
	}
	n, err := c.Names().Lookup(ctx, name)
	if err == nil && n.Kind != client.BadKind {
		return client.Ref{}, usagef("the name %q is not of a mark: want @bad/ADDRESS, or a mark as quarry fsck --bad shows it", name)
	}
	return n.Ref, err
}

// UnmarshalText is called by the parser.
func (m *mark) UnmarshalText(b []byte) error { return (*target)(m).UnmarshalText(b) }

type slabRestoreCmd struct {
	Mark   mark   `arg:"" complete:"target" help:"Mark of the slab, as fsck --bad shows it, or @bad/ADDRESS."`
	Target target `arg:"" complete:"target" help:"The object that was lost: REF or @NAME. It has to be the one that the slab had when it was marked."`
	payloadFlags
	Tag uint32 `placeholder:"N" help:"What the object is for, a number of yours, as before."`
}

// Help is shown by --help.
func (*slabRestoreCmd) Help() string {
	return "The payload comes from a copy that you have. The slab does not tell which object was lost: a reference of an object that was freed before would bring that one back. A payload that does not fit into the slab makes the object a large one. A chunk of a large object is not restored: write that object anew (quarry slab write), and discard the mark."
}

func (s *slabRestoreCmd) Run(ctx context.Context, a *app) error {
	b, err := s.read(a)
	if err != nil {
		return err
	}
	return a.with(ctx, nil, func(ctx context.Context, c *client.Client) error {
		mark, err := s.Mark.ref(ctx, c)
		if err != nil {
			return err
		}
		ref, err := s.Target.ref(ctx, c)
		if err != nil {
			return err
		}
		if err := c.Restore(ctx, mark, ref, b, s.Tag); err != nil {
			return about(mark, markError(err))
		}
		return a.print(map[string]any{"ref": ref, "bytes": len(b)}, func(io.Writer) {})
	})
}

type slabDiscardCmd struct {
	Marks []mark `arg:"" complete:"target" name:"mark" help:"Marks of slabs, as fsck --bad shows them, or @bad/ADDRESS."`
}

// Help is shown by --help.
func (*slabDiscardCmd) Help() string {
	return "References of the objects are those of freed objects from then on. Names that stand for them stay: quarry name delete."
}

func (s *slabDiscardCmd) Run(ctx context.Context, a *app) error {
	discarded := []client.Ref{}
	err := a.with(ctx, nil, func(ctx context.Context, c *client.Client) error {
		for _, m := range s.Marks {
			ref, err := m.ref(ctx, c)
			if err == nil {
				err = c.FreeBad(ctx, ref)
			}
			if err != nil {
				return about(ref, markError(err))
			}
			discarded = append(discarded, ref)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return a.print(map[string]any{"discarded": discarded}, func(io.Writer) {})
}

// markError says of a mark what ErrFreed says of an object.
func markError(err error) error {
	if errors.Is(err, client.ErrFreed) {
		return fmt.Errorf("the slab does not have this mark any more: quarry fsck --bad: %w", err)
	}
	return err
}

// about names the object in errors that do not.
func about(ref client.Ref, err error) error {
	if strings.Contains(err.Error(), ref.Addr.String()) {
		return err
	}
	return fmt.Errorf("%v: %w", ref, err)
}
