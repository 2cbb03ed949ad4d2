package flight

import (
	"context"
	"encoding/json"
	"time"

	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// Part is the metadata of an endpoint, as JSON: what is known of its range.
type Part struct {
	Node  string `json:"node,omitempty"` // that holds most of it
	Keys  int64  `json:"keys"`           // an estimate, as Bytes is
	Bytes int64  `json:"bytes"`
}

// ListFlights lists the trees whose names the caller may list. The criteria's expression is a prefix of names. A flight of the list has no endpoints: GetFlightInfo makes them.
func (s *Server) ListFlights(criteria *arrowflight.Criteria, out arrowflight.FlightService_ListFlightsServer) error {
	c := callerOf(out.Context())
	schema := arrowflight.SerializeSchema(schemaOf(standardColumns), memory.DefaultAllocator)
	return c.c.Names().List(out.Context(), string(criteria.GetExpression()), kv.NameKind, func(n client.Name) error {
		return out.Send(&arrowflight.FlightInfo{Schema: schema, FlightDescriptor: pathOf(n.Name), TotalRecords: -1, TotalBytes: -1})
	})
}

func pathOf(tree string) *arrowflight.FlightDescriptor {
	return &arrowflight.FlightDescriptor{Type: arrowflight.DescriptorPATH, Path: []string{tree}}
}

// GetSchema is the schema of what a descriptor selects.
func (s *Server) GetSchema(ctx context.Context, d *arrowflight.FlightDescriptor) (*arrowflight.SchemaResult, error) {
	q, err := requestOf(d)
	if err != nil {
		return nil, err
	}
	if _, err := callerOf(ctx).tree(ctx, q.tree, s.cfg.CacheBytes); err != nil {
		return nil, err
	}
	return &arrowflight.SchemaResult{Schema: arrowflight.SerializeSchema(schemaOf(q.columns), memory.DefaultAllocator)}, nil
}

// GetFlightInfo cuts what a descriptor selects into ranges, with an endpoint for each, in the order of their keys.
func (s *Server) GetFlightInfo(ctx context.Context, d *arrowflight.FlightDescriptor) (*arrowflight.FlightInfo, error) {
	q, err := requestOf(d)
	if err != nil {
		return nil, err
	}
	c := callerOf(ctx)
	t, err := c.tree(ctx, q.tree, s.cfg.CacheBytes)
	if err != nil {
		return nil, err
	}
	splits, err := t.Splits(ctx, btree.Range{From: q.from, To: q.to}, q.parts)
	if err != nil {
		return nil, err
	}
	info := &arrowflight.FlightInfo{Schema: arrowflight.SerializeSchema(schemaOf(q.columns), memory.DefaultAllocator), FlightDescriptor: d, Ordered: true}
	expires := s.now().Add(s.cfg.TicketTTL).Truncate(time.Second)
	for _, sp := range splits {
		k := &ticket{Version: ticketVersion, Tree: q.tree, Root: t.Entry().Ref.String(), Tenant: c.tenant, From: sp.From, To: sp.To, Contains: q.contains, Columns: q.columns, Expires: expires.Unix()}
		sealed, err := k.seal(c.principal)
		if err != nil {
			return nil, err
		}
		node := c.c.NodeName(sp.Node)
		about, err := json.Marshal(Part{Node: node, Keys: sp.Keys, Bytes: sp.Bytes})
		if err != nil {
			return nil, err
		}
		e := &arrowflight.FlightEndpoint{Ticket: &arrowflight.Ticket{Ticket: sealed}, ExpirationTime: timestamppb.New(expires), AppMetadata: about}
		if s.cfg.Locations != nil && node != "" {
			for _, uri := range s.cfg.Locations(node, c.c.NodeHost(sp.Node)) {
				e.Location = append(e.Location, &arrowflight.Location{Uri: uri})
			}
		}
		info.Endpoint = append(info.Endpoint, e)
		info.TotalRecords += sp.Keys
		info.TotalBytes += sp.Bytes
	}
	return info, nil
}

// ticketOf opens a ticket and its tree.
func (s *Server) ticketOf(ctx context.Context, sealed []byte) (*ticket, *kv.Tree, error) {
	c := callerOf(ctx)
	k, err := openTicket(sealed, c.principal, s.now())
	if err != nil {
		return nil, nil, err
	}
	t, err := c.tree(ctx, k.Tree, s.cfg.CacheBytes)
	if err != nil {
		return nil, nil, err
	}
	if now := t.Entry().Ref.String(); now != k.Root {
		return nil, nil, status.Errorf(codes.FailedPrecondition, "ticket: tree %q was replaced since: call GetFlightInfo again", k.Tree)
	}
	return k, t, nil
}
