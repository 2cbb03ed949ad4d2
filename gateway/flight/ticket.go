package flight

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/json"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	ticketVersion = 1
	// maxTicketBytes bounds a ticket: two keys, what is searched for, and a name, in base64.
	maxTicketBytes = 16 << 10
	macBytes       = sha256.Size
	ticketLabel    = "quarry flight ticket 1\x00"
)

// ticket says what a DoGet reads. On the wire it is a MAC, and this as JSON behind it.
//
// The MAC has a key that is made of the caller's token. So whoever shows a ticket has to show the token that it was made for, too, and every server can
// check it without a secret of its own. The ticket is no right: DoGet opens the tree with the caller's token as any call does.
type ticket struct {
	Version  int      `json:"v"`
	Tree     string   `json:"tree"`
	Root     string   `json:"root"` // of the incarnation of the tree
	Tenant   string   `json:"tenant,omitempty"`
	From     []byte   `json:"from,omitempty"`
	To       []byte   `json:"to,omitempty"` // none: no bound
	Contains []byte   `json:"contains,omitempty"`
	Columns  []string `json:"columns"`
	Expires  int64    `json:"expires"` // Unix seconds
}

// seal is the ticket as bytes, for a principal.
func (t *ticket) seal(p principal) ([]byte, error) {
	b, err := json.Marshal(t)
	if err != nil {
		return nil, err
	}
	return append(p.mac(b), b...), nil
}

// mac authenticates the bytes of a ticket.
func (p principal) mac(b []byte) []byte {
	key := sha256.Sum256([]byte(ticketLabel + p.token))
	m := hmac.New(sha256.New, key[:])
	m.Write(b)
	return m.Sum(nil)
}

// openTicket checks a ticket that a principal shows. Its errors have a code of gRPC.
func openTicket(sealed []byte, p principal, now time.Time) (*ticket, error) {
	if len(sealed) > maxTicketBytes {
		return nil, status.Errorf(codes.InvalidArgument, "ticket: %d bytes, at most %d", len(sealed), maxTicketBytes)
	}
	if len(sealed) <= macBytes {
		return nil, status.Error(codes.InvalidArgument, "ticket: it is not one of GetFlightInfo")
	}
	b := sealed[macBytes:]
	if !hmac.Equal(sealed[:macBytes], p.mac(b)) {
		return nil, status.Error(codes.PermissionDenied, "ticket: it was made for a caller with another token, or was changed: call GetFlightInfo with this token")
	}
	t := &ticket{}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(t); err != nil || t.Version != ticketVersion {
		return nil, status.Errorf(codes.InvalidArgument, "ticket: it is of another version of this server: call GetFlightInfo again (%v)", err)
	}
	// The decoder takes more than seal writes: names in another case, a field twice, what follows the object. Each ticket has one form.
	if written, err := json.Marshal(t); err != nil || !bytes.Equal(written, b) {
		return nil, status.Error(codes.InvalidArgument, "ticket: it is not as GetFlightInfo writes one: call GetFlightInfo")
	}
	if t.Tenant != p.tenant {
		return nil, status.Errorf(codes.PermissionDenied, "ticket: it is for tenant %q, and the header %s names %q", t.Tenant, TenantHeader, p.tenant)
	}
	if !now.Before(time.Unix(t.Expires, 0)) {
		return nil, status.Errorf(codes.FailedPrecondition, "ticket: it was good until %v: call GetFlightInfo again", time.Unix(t.Expires, 0).UTC())
	}
	if err := checkColumns(t.Columns); err != nil || len(t.Columns) == 0 {
		return nil, status.Errorf(codes.InvalidArgument, "ticket: no columns, or unknown ones (%v)", err)
	}
	return t, nil
}
