package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/internal/payloadkey"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/verify/bench"
)

type slabListCmd struct {
	Owner  *uint32  `placeholder:"SESSION" help:"Only objects that this session wrote last; see quarry session list. The number of an ended session may be another's by now."`
	Tag    *uint32  `placeholder:"N" help:"Only objects with this tag; those of quarry bench have 48764."`
	Clear  bool     `name:"not-encrypted" xor:"encrypted" help:"Only objects that are not encrypted."`
	Key    *string  `name:"payload-key" xor:"encrypted" placeholder:"KEY" help:"Only objects that are encrypted with this key; quarry key payload list shows the keys of a file."`
	Region []uint32 `short:"R" placeholder:"N" help:"Only in these regions; default all that are open."`
	Limit  int      `placeholder:"N" help:"Largest number of objects to show, and to free."`
	Free   bool     `help:"Free what is listed, except objects that have a name, belong to a tree, or have changed since. Needs --owner of an ended session, or --tag."`
}

// Help is shown by --help.
func (*slabListCmd) Help() string {
	return "Looks through the memory of whole regions. Example: quarry slab list --tag 48764 --free gives back what interrupted benchmarks left."
}

// slabLine is an object in the list.
type slabLine struct {
	Ref     client.Ref `json:"ref"`
	Tag     uint32     `json:"tag"`
	Bytes   int        `json:"bytes"` // of the payload, or of the index of an object of several slabs
	Slab    string     `json:"slab"`  // PAIR, SINGLE or STAGED
	Version uint64     `json:"version"`
	Owner   uint32     `json:"owner"`         // session that wrote it last
	Key     string     `json:"key,omitempty"` // that it is encrypted with; none: it is not
	Name    string     `json:"name,omitempty"`
	Freed   bool       `json:"freed,omitempty"`
	Kept    string     `json:"kept,omitempty"` // why it was not freed
}

func (l *slabListCmd) Run(ctx context.Context, a *app) error {
	if l.Free && l.Owner == nil && l.Tag == nil {
		return usagef("--free needs --owner or --tag: it would free every object")
	}
	if l.Limit < 0 {
		return usagef("--limit %d: want at least 1", l.Limit)
	}
	if l.Free && l.Owner != nil {
		if err := a.ended(ctx, *l.Owner); err != nil {
			return err
		}
	}
	tenant, err := a.tenantNumber(ctx)
	if err != nil {
		return err
	}
	bar := a.progress("looking at blocks")
	list := []slabLine{}
	_, err = a.objects(ctx, l.Region, tenant, bar.set, func(o fsck.Object) {
		line := slabLine{Ref: o.Ref, Tag: o.Tag, Bytes: o.Bytes, Slab: o.Kind.String(), Version: o.Version, Owner: o.Writer}
		if o.Encrypted {
			line.Key = payloadkey.IDText(o.Key)
		}
		if (l.Limit == 0 || len(list) < l.Limit) && l.wants(&line) {
			list = append(list, line)
		}
	})
	bar.end()
	if err != nil {
		return err
	}
	slices.SortFunc(list, func(x, y slabLine) int { return cmp.Compare(x.Ref.Addr, y.Ref.Addr) })
	freed := 0
	if err = a.named(ctx, list); err == nil && l.Free {
		freed, err = a.freeListed(ctx, list)
	}
	if err != nil {
		return fmt.Errorf("%d objects are freed, the others are as they were: %w", freed, err)
	}
	return a.print(list, func(w io.Writer) {
		bytes := printSlabs(w, list)
		fmt.Fprintf(w, "%d objects, %s", len(list), bytesText(bytes))
		if l.Free {
			fmt.Fprintf(w, "; %d are freed", freed)
		}
		fmt.Fprintln(w)
	})
}

// wants says whether an object is of those to list.
func (l *slabListCmd) wants(o *slabLine) bool {
	return (l.Owner == nil || o.Owner == *l.Owner) && (l.Tag == nil || o.Tag == *l.Tag) && (!l.Clear || o.Key == "") && (l.Key == nil || o.Key == *l.Key)
}

// printSlabs writes a table of objects and returns the sum of their bytes.
func printSlabs(w io.Writer, list []slabLine) (bytes uint64) {
	fmt.Fprintln(w, "REF\tTAG\tBYTES\tSLAB\tVERSION\tOWNER\tKEY\tNAME")
	for _, o := range list {
		bytes += uint64(o.Bytes)
		note := o.Name
		if o.Kept != "" {
			note += " (kept: " + o.Kept + ")"
		}
		fmt.Fprintf(w, "%v\t%d\t%d\t%s\t%d\t%d\t%s\t%s\n", o.Ref, o.Tag, o.Bytes, o.Slab, o.Version, o.Owner, cmp.Or(o.Key, "-"), note)
	}
	return bytes
}

// ended refuses a session that may still name what it has made.
func (a *app) ended(ctx context.Context, session uint32) error {
	res, err := ask(ctx, a, &quarrypb.ListSessionsRequest{}, quarrypbconnect.ControllerClient.ListSessions)
	if err != nil {
		return err
	}
	for _, s := range res.Sessions {
		if s.Session == session && s.State != "fenced" {
			return usagef("session %d (%s) is %s: its objects are in use; quarry session revoke %d ends it", session, s.Name, s.State, session)
		}
	}
	return nil
}

// named fills in the names of the placement library.
func (a *app) named(ctx context.Context, list []slabLine) error {
	return a.with(ctx, readOnly, func(ctx context.Context, c *client.Client) error {
		return c.Names().List(ctx, "", "", func(n client.Name) error {
			at, ok := slices.BinarySearchFunc(list, n.Ref.Addr, func(l slabLine, addr proto.Addr) int { return cmp.Compare(l.Ref.Addr, addr) })
			if ok && list[at].Ref == n.Ref {
				list[at].Name = n.Name
			}
			return nil
		})
	})
}

// freeListed frees what nothing names, each only if it is still at the version listed.
func (a *app) freeListed(ctx context.Context, list []slabLine) (freed int, err error) {
	c, err := a.connect(ctx, nil)
	if err != nil {
		return 0, err
	}
	for i := range list {
		o := &list[i]
		switch {
		case o.Name != "":
			o.Kept = "it has a name"
			continue
		case o.Tag >= btree.TagRoot && o.Tag <= btree.TagLayer:
			o.Kept = "it belongs to a tree; quarry kv collect frees what no tree uses"
			continue
		}
		switch err := c.CompareAndFree(ctx, o.Ref, o.Version); {
		case err == nil:
			o.Freed = true
			freed++
		case errors.Is(err, client.ErrConflict), errors.Is(err, client.ErrFreed), errors.Is(err, client.ErrBadRef):
			o.Kept = "it has changed since"
		default:
			return freed, errors.Join(about(o.Ref, err), c.Close())
		}
	}
	return freed, c.Close()
}

// Objects of benchmarks are found by their tag, also those of interrupted ones.
var _ = [1]struct{}{}[bench.Tag-48764]
