package controller

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/quarrystore/quarry/controller/state"
	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/rights"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

// Tokens of one role each are records of etcd that hold their hash. A token is
// qt_ID_SECRET: 16 and 64 hexadecimal digits.
const (
	tokenPrefix   = "qt_"
	tokenIDBytes  = 8
	tokenKeyBytes = 32
	maxTokens     = 1024
	maxTokenNote  = 128
	// tokenHold is how long a controller uses what it has read of a token.
	tokenHold = time.Second
)

// tokenRecord is the value of a token's key.
type tokenRecord struct {
	Role    identity.Role `json:"role"`           // of the callers that show it
	Hash    string        `json:"sha256"`         // of the secret's bytes, which are random: no salt is needed
	Note    string        `json:"note,omitempty"` // for people
	Node    string        `json:"node,omitempty"` // of role node: the one node that shows it
	Created int64         `json:"created_unix"`
}

// tokens are the records that were read a moment ago, by id.
type tokens struct {
	mu   sync.Mutex // guards read
	read map[string]heldToken
}

// heldToken is a token's record as it was read.
type heldToken struct {
	rec   tokenRecord
	until time.Time // it is read again then
}

// tokenKey is where a token's record is.
func (c *Controller) tokenKey(id string) string { return c.cfg.Prefix + "token/" + id }

// tokenCaller is the holder of a token.
func (c *Controller) tokenCaller(ctx context.Context, token string) (rights.Caller, error) {
	id, secret, _ := strings.Cut(strings.TrimPrefix(token, tokenPrefix), "_")
	key, err := hex.DecodeString(secret)
	if err != nil || len(key) != tokenKeyBytes || len(id) != 2*tokenIDBytes || strings.Trim(id, "0123456789abcdef") != "" {
		return rights.Caller{}, errUnauthenticated
	}
	rec, err := c.token(ctx, id)
	if err != nil {
		return rights.Caller{}, err
	}
	hash := sha256.Sum256(key)
	if subtle.ConstantTimeCompare([]byte(hex.EncodeToString(hash[:])), []byte(rec.Hash)) != 1 {
		return rights.Caller{}, errUnauthenticated
	}
	name := "token " + id
	if rec.Note != "" {
		name += " (" + rec.Note + ")"
	}
	return rights.Caller{Name: name, Roles: []identity.Role{rec.Role}, Token: id, Node: rec.Node}, nil
}

// token reads the record of a token, at most once in tokenHold.
func (c *Controller) token(ctx context.Context, id string) (tokenRecord, error) {
	c.tokens.mu.Lock()
	h, ok := c.tokens.read[id]
	c.tokens.mu.Unlock()
	asked := time.Now()
	if ok && asked.Before(h.until) {
		return h.rec, nil
	}
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	res, err := c.cfg.Etcd.Get(ctx, c.tokenKey(id))
	if err != nil {
		return tokenRecord{}, fmt.Errorf("the token cannot be looked up now: etcd: %w", err)
	}
	var rec tokenRecord
	if len(res.Kvs) == 0 || json.Unmarshal(res.Kvs[0].Value, &rec) != nil || !slices.Contains(identity.Roles, rec.Role) {
		return tokenRecord{}, errUnauthenticated
	}
	c.tokens.mu.Lock()
	defer c.tokens.mu.Unlock()
	if c.tokens.read == nil || len(c.tokens.read) > maxTokens {
		c.tokens.read = map[string]heldToken{}
	}
	c.tokens.read[id] = heldToken{rec, asked.Add(tokenHold)}
	return rec, nil
}

// CreateToken makes a token of one role. The answer alone has its secret: etcd has a hash.
func (s *service) CreateToken(ctx context.Context, r *connect.Request[quarrypb.CreateTokenRequest]) (*connect.Response[quarrypb.CreateTokenResponse], error) {
	role := identity.Role(r.Msg.Role)
	switch {
	case s.c.open():
		return nil, connect.NewError(connect.CodeFailedPrecondition, errors.New("this cluster asks no caller for anything: start the controllers with --token, or with --tls-cert, --tls-key and --tls-ca, first"))
	case role == identity.Controller || !slices.Contains(identity.Roles, role):
		return nil, invalid("role %q: want client, node, worker, gateway, viewer or operator", r.Msg.Role)
	case r.Msg.Node != "" && role != identity.Node:
		return nil, invalid("node %q: a token of role %s is of no node", r.Msg.Node, role)
	case r.Msg.Node != "" && !state.GoodNodeName(r.Msg.Node):
		return nil, invalid("node name %q: want 1 to %d printable bytes without '/' or space", r.Msg.Node, state.MaxNameBytes)
	case len(r.Msg.Note) > maxTokenNote || strings.ContainsAny(r.Msg.Note, "\n\r"):
		return nil, invalid("note %q: want one line of at most %d bytes", r.Msg.Note, maxTokenNote)
	}
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	list, err := s.c.tokenList(ctx)
	if err != nil {
		return nil, err
	}
	if len(list) >= maxTokens {
		return nil, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("%d tokens, the most there can be: revoke some", len(list)))
	}
	raw := make([]byte, tokenIDBytes+tokenKeyBytes)
	rand.Read(raw)
	id, key := hex.EncodeToString(raw[:tokenIDBytes]), raw[tokenIDBytes:]
	hash := sha256.Sum256(key)
	rec := tokenRecord{Role: role, Hash: hex.EncodeToString(hash[:]), Note: r.Msg.Note, Node: r.Msg.Node, Created: time.Now().Unix()}
	value, err := json.Marshal(rec)
	if err != nil {
		return nil, err
	}
	if err := s.lead(ctx, clientv3.OpPut(s.c.tokenKey(id), string(value))); err != nil {
		return nil, err
	}
	return connect.NewResponse(&quarrypb.CreateTokenResponse{Token: rec.message(id), Secret: tokenPrefix + id + "_" + hex.EncodeToString(key)}), nil
}

// message is the token without its hash.
func (t tokenRecord) message(id string) *quarrypb.Token {
	return &quarrypb.Token{Id: id, Role: string(t.Role), Note: t.Note, Node: t.Node, CreatedUnix: t.Created}
}

// lead carries out a change while this controller leads.
func (s *service) lead(ctx context.Context, op clientv3.Op) error {
	t := s.c.term.Load()
	if t == nil {
		return s.notLeading()
	}
	res, err := s.c.cfg.Etcd.Txn(ctx).If(guard(t.key, t.rev)).Then(op).Commit()
	switch {
	case err != nil:
		return connect.NewError(connect.CodeUnknown, fmt.Errorf("whether it was done is unknown: etcd: %w", err))
	case !res.Succeeded:
		return s.notLeading()
	}
	return nil
}

// tokenList reads all tokens.
func (c *Controller) tokenList(ctx context.Context) ([]*quarrypb.Token, error) {
	prefix := c.tokenKey("")
	res, err := c.cfg.Etcd.Get(ctx, prefix, clientv3.WithPrefix())
	if err != nil {
		return nil, etcdError(err)
	}
	var out []*quarrypb.Token
	for _, kv := range res.Kvs {
		var rec tokenRecord
		if err := json.Unmarshal(kv.Value, &rec); err != nil {
			return nil, connect.NewError(connect.CodeDataLoss, fmt.Errorf("record %s is damaged: %w", kv.Key, err))
		}
		out = append(out, rec.message(strings.TrimPrefix(string(kv.Key), prefix)))
	}
	slices.SortFunc(out, func(a, b *quarrypb.Token) int { return int(a.CreatedUnix - b.CreatedUnix) })
	return out, nil
}

// ListTokens lists tokens without their secrets.
func (s *service) ListTokens(ctx context.Context, _ *connect.Request[quarrypb.ListTokensRequest]) (*connect.Response[quarrypb.ListTokensResponse], error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout)
	defer cancel()
	list, err := s.c.tokenList(ctx)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&quarrypb.ListTokensResponse{Tokens: list}), nil
}

// RevokeToken deletes a token, and returns when no controller accepts it from its cache any more.
// CodeUnknown says that the token is deleted and that the wait for the caches was cut short.
func (s *service) RevokeToken(ctx context.Context, r *connect.Request[quarrypb.RevokeTokenRequest]) (*connect.Response[quarrypb.RevokeTokenResponse], error) {
	ctx, cancel := context.WithTimeout(ctx, etcdTimeout+tokenHold)
	defer cancel()
	list, err := s.c.tokenList(ctx)
	if err != nil {
		return nil, err
	}
	if !slices.ContainsFunc(list, func(t *quarrypb.Token) bool { return t.Id == r.Msg.Id }) {
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("no token %q: quarry token list shows them", r.Msg.Id))
	}
	if err := s.lead(ctx, clientv3.OpDelete(s.c.tokenKey(r.Msg.Id))); err != nil {
		return nil, err
	}
	// Every controller has forgotten it then.
	select {
	case <-time.After(tokenHold):
	case <-ctx.Done():
		return nil, connect.NewError(connect.CodeUnknown, fmt.Errorf("the token is revoked; some controllers may take it for %v more", tokenHold))
	}
	return connect.NewResponse(&quarrypb.RevokeTokenResponse{}), nil
}
