package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/quarrystore/quarry/internal/payloadkey"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// PayloadKey is a secret of 32 random bytes with which payloads are encrypted. Its ID, 48 bits of
// a hash, stands in each of them.
type PayloadKey = payloadkey.Key

// Keys gives the keys of a tenant: a KeyFile, or a key management service.
type Keys interface {
	// PayloadKeys returns the keys of a tenant: the first encrypts what is written, all decrypt what is
	// read. It is called by Connect, then every 30 s, and 1 s after an object has named another
	// key. Where a later call fails, takes more than 30 s, or returns no key, the Client goes on with the keys
	// that it has.
	PayloadKeys(ctx context.Context, tenant string) ([]PayloadKey, error)
}

// KeyFile is the name of a file of keys as quarry key payload create makes it: a line for each, with the
// tenant and the key. A file that other users can read or change is refused (chmod 600).
type KeyFile string

// PayloadKeys reads the file. An error if it has no key of the tenant, or the context has ended.
func (f KeyFile) PayloadKeys(ctx context.Context, tenant string) ([]PayloadKey, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	list, err := payloadkey.ReadFile(string(f))
	if err != nil {
		return nil, err
	}
	keys := payloadkey.Of(list, tenant)
	if len(keys) == 0 {
		return nil, fmt.Errorf("key file %s has no key of tenant %q: quarry key payload create %s --tenant %s makes one", string(f), tenant, string(f), tenant)
	}
	return keys, nil
}

const (
	// keyPeriod is the time between two looks for other keys, keyPause the time before one that an
	// unknown key asks for.
	keyPeriod = 30 * time.Second
	keyPause  = time.Second
)

// payloadKeys are the rings of the tenants that the Client's sessions have been in.
type payloadKeys struct {
	mu     sync.Mutex
	rings  map[string]*payloadkey.Ring // guarded by mu
	missed chan struct{}               // of capacity 1: a payload has named a key that no ring has
}

// keysOf is the ring of a tenant: without keys if the Config has none.
func (c *Client) keysOf(ctx context.Context, tenant string) (*payloadkey.Ring, error) {
	p := &c.payloadKeys
	p.mu.Lock()
	r := p.rings[tenant]
	p.mu.Unlock()
	if r != nil {
		return r, nil
	}
	keys, err := c.askKeys(ctx, tenant)
	if err != nil {
		return nil, err
	}
	r = payloadkey.NewRing(tenant, c.cfg.AllowClear, c.keyMissed, keys...)
	p.mu.Lock()
	defer p.mu.Unlock()
	if other := p.rings[tenant]; other != nil {
		return other, nil
	}
	p.rings[tenant] = r
	return r, nil
}

// refused counts payloads that were refused, by reason.
func (p *payloadKeys) refused() map[string]uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[string]uint64{}
	for _, r := range p.rings {
		r.Refused(func(why payloadkey.Refusal, n uint64) { out[why.String()] += n })
	}
	return out
}

// askKeys asks Config.Keys for the keys of a tenant.
func (c *Client) askKeys(ctx context.Context, tenant string) ([]PayloadKey, error) {
	if c.cfg.Keys == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, keyPeriod)
	defer cancel()
	keys, err := c.cfg.Keys.PayloadKeys(ctx, tenant)
	switch {
	case err != nil:
	case len(keys) == 0 || len(keys) > payloadkey.MaxKeys:
		err = fmt.Errorf("%d keys: want 1 to %d", len(keys), payloadkey.MaxKeys)
	case slices.Contains(keys, PayloadKey{}):
		err = errors.New("a key of zeros: want 32 random bytes")
	}
	if err != nil {
		return nil, fmt.Errorf("keys of tenant %q: %w", tenant, err)
	}
	return keys, nil
}

// keyMissed has the key files read again: a payload has named a key that is not known.
func (c *Client) keyMissed() {
	select {
	case c.payloadKeys.missed <- struct{}{}:
	default:
	}
}

// refreshKeys takes other keys from Config.Keys until the Client is closed.
func (c *Client) refreshKeys() {
	p := &c.payloadKeys
	for {
		select {
		case <-time.After(keyPeriod):
		case <-p.missed:
			select {
			case <-time.After(keyPause):
			case <-c.ctx.Done():
			}
		case <-c.ctx.Done():
		}
		if c.ctx.Err() != nil {
			return
		}
		p.mu.Lock()
		var rings []*payloadkey.Ring
		for _, r := range p.rings {
			rings = append(rings, r)
		}
		p.mu.Unlock()
		for _, r := range rings {
			keys, err := c.askKeys(c.ctx, r.Tenant())
			if err == nil {
				r.Set(keys...)
			} else if c.ctx.Err() == nil {
				c.cfg.Logger.Warn("payload keys are not read again: the ones before stay", "error", err)
			}
		}
	}
}

// loadKeys sets the session's ring. named is the tenant that the controller has named, "" if it is of an
// earlier version. On an error the session is closed.
func (s *session) loadKeys(ctx context.Context, named string) error {
	c := s.client
	tenant, err := c.cfg.tenantOfKeys(named)
	if err == nil {
		s.keys, err = c.keysOf(ctx, tenant)
	}
	if err == nil {
		return nil
	}
	_, cerr := request(c.control, ctx, &quarrypb.CloseSessionRequest{Serial: s.ticket.Serial, Proof: s.shown.Load().proof}, quarrypbconnect.ControllerClient.CloseSession)
	return errors.Join(err, cerr)
}

// tenantOfKeys is the tenant whose keys a session uses. A key of another tenant would let its clients read
// what the session writes: so it is not guessed.
func (c Config) tenantOfKeys(named string) (string, error) {
	switch {
	case c.Keys == nil:
	case named == "" && c.Tenant == "":
		return "", errors.New("keys: this controller does not say in which tenant the session is: name the tenant with --tenant (QUARRY_TENANT, client.Config.Tenant), or upgrade the controllers")
	case named != "" && c.Tenant != "" && named != c.Tenant:
		return "", fmt.Errorf("keys: the session is asked for in tenant %q, and this controller says that it is in %q", c.Tenant, named)
	}
	return cmp.Or(named, c.Tenant, quarrypb.DefaultTenant), nil
}

// PayloadOverhead is by how many bytes encryption makes a payload longer in its slab: 0 without Config.Keys.
func (c *Client) PayloadOverhead() int {
	if c.cfg.Keys == nil {
		return 0
	}
	return proto.EncryptionBytes
}
