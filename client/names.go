package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// Names is the placement library: a table of names and the Refs they stand for, kept by the
// controllers (US 2017/0149890 [0048]). Names are 1 to 255 bytes, ordered bytewise. Safe for
// concurrent use.
//
// All methods fail with ErrBadName for a string that cannot be a name, and with
// ErrUnreachable if no controller answers. A change that may have arrived at a controller
// and brought no answer fails with ErrUnknown: look the name up to find out.
type Names struct{ c *Client }

// Names returns the cluster's placement library.
func (c *Client) Names() *Names { return &Names{c} }

// Name is one entry of the placement library.
type Name struct {
	Name     string            `json:"name"`
	Kind     string            `json:"kind"` // chosen by the caller: "object", "tree", ...
	Ref      Ref               `json:"ref"`
	Revision uint64            `json:"revision"`        // rises with every change of the entry
	Owner    string            `json:"owner,omitempty"` // Config.Name of the client that created it
	Created  time.Time         `json:"created"`
	Notes    map[string]string `json:"notes,omitempty"` // chosen by the caller
}

// nameOf is a name as a controller has sent it.
func nameOf(m *quarrypb.Name) (Name, error) {
	if len(m.GetRef()) != proto.RefBytes {
		return Name{}, fmt.Errorf("name %q: the controller sent a reference of %d bytes", m.GetName(), len(m.GetRef()))
	}
	return Name{Name: m.Name, Kind: m.Kind, Ref: proto.DecodeRef(m.Ref), Revision: m.Revision, Owner: m.Owner,
		Created: time.Unix(m.CreatedUnixS, 0).UTC(), Notes: m.Notes}, nil
}

// message is the name as it is sent to a controller.
func (n Name) message() *quarrypb.Name {
	ref, _ := n.Ref.AppendBinary(nil)
	return &quarrypb.Name{Name: n.Name, Kind: n.Kind, Ref: ref, Owner: n.Owner, Notes: n.Notes}
}

// nameError adds the name to an error and turns a controller's code into an error of this
// package.
func nameError(name string, err error) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		switch ce.Code() {
		case connect.CodeNotFound:
			return fmt.Errorf("%w: %q", ErrNoName, name)
		case connect.CodeAlreadyExists:
			return fmt.Errorf("%w: %q", ErrNameExists, name)
		case connect.CodeAborted, connect.CodeFailedPrecondition:
			return fmt.Errorf("%w: name %q: %s", ErrConflict, name, ce.Message())
		case connect.CodeInvalidArgument:
			return fmt.Errorf("%w: %s", ErrBadName, ce.Message())
		}
	}
	return fmt.Errorf("name %q: %w", name, err)
}

// entryOf makes an entry, or an error, of a controller's answer about one name.
func entryOf(name string, m *quarrypb.Name, err error) (Name, error) {
	if err != nil {
		return Name{}, nameError(name, err)
	}
	return nameOf(m)
}

// Create adds a name that stands for ref; ErrNameExists if the name is taken.
func (n *Names) Create(ctx context.Context, name, kind string, ref Ref) (Name, error) {
	return n.create(ctx, name, kind, ref, nil)
}

// create is Create on condition that a session is live; ErrFenced otherwise. A nil session
// means no condition.
func (n *Names) create(ctx context.Context, name, kind string, ref Ref, s *session) (Name, error) {
	e := Name{Name: name, Kind: kind, Ref: ref, Owner: n.c.cfg.Name}
	q := &quarrypb.CreateNameRequest{Name: e.message()}
	if s != nil {
		q.Serial, q.Proof = s.ticket.Serial, s.shown.Load().proof
	}
	m, err := requestOnce(n.c.control, ctx, q, quarrypbconnect.ControllerClient.CreateName)
	if ce := new(connect.Error); errors.As(err, &ce) && ce.Code() == connect.CodeFailedPrecondition {
		return Name{}, fmt.Errorf("%w: name %q: %s", ErrFenced, name, ce.Message())
	}
	return entryOf(name, m, err)
}

// Lookup returns the entry of a name; ErrNoName if there is none.
func (n *Names) Lookup(ctx context.Context, name string) (Name, error) {
	m, err := request(n.c.control, ctx, &quarrypb.LookupNameRequest{Name: name}, quarrypbconnect.ControllerClient.LookupName)
	return entryOf(name, m, err)
}

// MaxNamesOnce is the largest number of names that one CreateMany can make.
const MaxNamesOnce = 100

// LookupMany returns the entries of several names. A name without an entry is not in the map.
func (n *Names) LookupMany(ctx context.Context, names []string) (map[string]Name, error) {
	found := make(map[string]Name, len(names))
	for part := range slices.Chunk(names, MaxNamesOnce) {
		m, err := request(n.c.control, ctx, &quarrypb.LookupNamesRequest{Names: part}, quarrypbconnect.ControllerClient.LookupNames)
		if err != nil {
			return nil, nameError(part[0], err)
		}
		for _, e := range m.Names {
			name, err := nameOf(e)
			if err != nil {
				return nil, err
			}
			found[name.Name] = name
		}
	}
	return found, ctx.Err()
}

// CreateMany adds at most MaxNamesOnce names, all or none: ErrNameExists if one of them is
// taken. It uses the Name, Kind, Ref and Notes of each entry.
func (n *Names) CreateMany(ctx context.Context, entries []Name) ([]Name, error) {
	if len(entries) > MaxNamesOnce {
		return nil, fmt.Errorf("%w: %d names at once, at most %d", ErrArgument, len(entries), MaxNamesOnce)
	}
	q := &quarrypb.CreateNamesRequest{}
	for _, e := range entries {
		e.Owner = n.c.cfg.Name
		q.Names = append(q.Names, e.message())
	}
	m, err := requestOnce(n.c.control, ctx, q, quarrypbconnect.ControllerClient.CreateNames)
	var ce *connect.Error
	if errors.As(err, &ce) && ce.Code() == connect.CodeAlreadyExists {
		return nil, fmt.Errorf("%w: %s", ErrNameExists, ce.Message())
	}
	if err != nil {
		return nil, nameError(fmt.Sprintf("%d names", len(entries)), err)
	}
	made := make([]Name, len(m.Names))
	for i, e := range m.Names {
		if made[i], err = nameOf(e); err != nil {
			return nil, err
		}
	}
	return made, nil
}

// Swap makes a name stand for another ref if its entry is still at a revision; ErrConflict
// otherwise.
func (n *Names) Swap(ctx context.Context, name string, revision uint64, ref Ref) (Name, error) {
	now, err := n.Lookup(ctx, name)
	if err != nil {
		return Name{}, err
	}
	now.Ref, now.Revision = ref, revision
	return n.Change(ctx, now)
}

// Change gives a name the Ref and the Notes of an entry if it is still at the entry's Revision; ErrConflict
// otherwise. Under a context of Bind the name changes only while that session is live: ErrFenced otherwise.
func (n *Names) Change(ctx context.Context, e Name) (Name, error) {
	s, _ := ctx.Value(boundKey{}).(*session)
	if s != nil && s.client != n.c {
		s = nil
	}
	return n.change(ctx, e, s)
}

// change is Change on condition that a session is live. A nil session means no condition.
func (n *Names) change(ctx context.Context, e Name, s *session) (Name, error) {
	q := &quarrypb.SwapNameRequest{Name: e.message(), Revision: e.Revision}
	if s != nil {
		q.Serial, q.Proof = s.ticket.Serial, s.shown.Load().proof
	}
	m, err := requestOnce(n.c.control, ctx, q, quarrypbconnect.ControllerClient.SwapName)
	if ce := new(connect.Error); s != nil && errors.As(err, &ce) && ce.Code() == connect.CodeFailedPrecondition {
		return Name{}, fmt.Errorf("%w: name %q: %s", ErrFenced, e.Name, ce.Message())
	}
	return entryOf(e.Name, m, err)
}

// Delete removes a name if its entry is still at a revision; ErrConflict otherwise. Revision
// 0 means any. The object stays.
func (n *Names) Delete(ctx context.Context, name string, revision uint64) error {
	_, err := requestOnce(n.c.control, ctx, &quarrypb.DeleteNameRequest{Name: name, Revision: revision}, quarrypbconnect.ControllerClient.DeleteName)
	return nameError(name, err)
}

// List calls f for every name with a prefix and a kind, in order; kind "" means every kind.
// It is no snapshot: names may change meanwhile. An error of f ends List and is returned.
func (n *Names) List(ctx context.Context, prefix, kind string, f func(Name) error) error {
	after := ""
	for {
		m, err := request(n.c.control, ctx, &quarrypb.ListNamesRequest{Prefix: prefix, Kind: kind, After: after}, quarrypbconnect.ControllerClient.ListNames)
		if err != nil {
			return nameError(prefix, err)
		}
		for _, e := range m.Names {
			name, err := nameOf(e)
			if err != nil {
				return err
			}
			if err := f(name); err != nil {
				return err
			}
			after = e.Name
		}
		if !m.More || len(m.Names) == 0 {
			return nil
		}
	}
}
