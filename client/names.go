package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// Names is the placement library: friendly name -> Ref, kept by the controllers
// (US 2017/0149890 [0048]).
type Names struct{ c *Client }

// Names returns the cluster's placement library.
func (c *Client) Names() *Names { return &Names{c} }

// Name is one entry.
type Name struct {
	Name     string            `json:"name"`
	Kind     string            `json:"kind"` // "object", "tree", ...
	Ref      Ref               `json:"ref"`
	Revision uint64            `json:"revision"` // rises with every change of the entry
	Owner    string            `json:"owner,omitempty"`
	Created  time.Time         `json:"created"`
	Notes    map[string]string `json:"notes,omitempty"`
}

func nameOf(m *quarrypb.Name) (Name, error) {
	if len(m.GetRef()) != proto.RefBytes {
		return Name{}, fmt.Errorf("name %q: the controller sent a reference of %d bytes", m.GetName(), len(m.GetRef()))
	}
	return Name{Name: m.Name, Kind: m.Kind, Ref: proto.DecodeRef(m.Ref), Revision: m.Revision, Owner: m.Owner,
		Created: time.Unix(m.CreatedUnixS, 0).UTC(), Notes: m.Notes}, nil
}

func (n Name) message() *quarrypb.Name {
	ref, _ := n.Ref.AppendBinary(nil)
	return &quarrypb.Name{Name: n.Name, Kind: n.Kind, Ref: ref, Owner: n.Owner, Notes: n.Notes}
}

// answer names the name and turns codes into this package's errors.
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
			return fmt.Errorf("name %q: %s", name, ce.Message())
		}
	}
	return fmt.Errorf("name %q: %w", name, err)
}

func (n *Names) one(name string, m *quarrypb.Name, err error) (Name, error) {
	if err != nil {
		return Name{}, nameError(name, err)
	}
	return nameOf(m)
}

// Create makes a name; ErrNameExists if it is taken.
func (n *Names) Create(ctx context.Context, name, kind string, ref Ref) (Name, error) {
	e := Name{Name: name, Kind: kind, Ref: ref, Owner: n.c.cfg.Name}
	m, err := change(n.c.control, ctx, &quarrypb.CreateNameRequest{Name: e.message()}, quarrypbconnect.ControllerClient.CreateName)
	return n.one(name, m, err)
}

// Lookup finds a name; ErrNoName if there is none.
func (n *Names) Lookup(ctx context.Context, name string) (Name, error) {
	m, err := unary(n.c.control, ctx, &quarrypb.LookupNameRequest{Name: name}, quarrypbconnect.ControllerClient.LookupName)
	return n.one(name, m, err)
}

// Swap aims a name elsewhere if it is still at a revision; ErrConflict otherwise.
func (n *Names) Swap(ctx context.Context, name string, revision uint64, ref Ref) (Name, error) {
	now, err := n.Lookup(ctx, name)
	if err != nil {
		return Name{}, err
	}
	now.Ref = ref
	m, err := change(n.c.control, ctx, &quarrypb.SwapNameRequest{Name: now.message(), Revision: revision}, quarrypbconnect.ControllerClient.SwapName)
	return n.one(name, m, err)
}

// Delete removes a name if it is still at a revision; 0 means whatever it is at.
func (n *Names) Delete(ctx context.Context, name string, revision uint64) error {
	_, err := change(n.c.control, ctx, &quarrypb.DeleteNameRequest{Name: name, Revision: revision}, quarrypbconnect.ControllerClient.DeleteName)
	return nameError(name, err)
}

// List calls f for every name with a prefix, in order; kind "" means all kinds.
func (n *Names) List(ctx context.Context, prefix, kind string, f func(Name) error) error {
	after := ""
	for {
		m, err := unary(n.c.control, ctx, &quarrypb.ListNamesRequest{Prefix: prefix, Kind: kind, After: after}, quarrypbconnect.ControllerClient.ListNames)
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
