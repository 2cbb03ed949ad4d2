package payloadkey

import (
	"fmt"
	"strings"
	"sync/atomic"
)

// Ring holds the keys of one tenant: the first encrypts, all decrypt. Safe for many goroutines.
type Ring struct {
	tenant  string
	clear   bool
	ciphers atomic.Pointer[[]*Cipher]
	missed  func()
	refused [refusals]atomic.Uint64
}

// Refusal is why a payload was refused.
type Refusal int

const (
	NoKey        Refusal = iota // it names a key that the ring does not have
	NotEncrypted                // it is clear
	NotAuthentic                // no holder of the key has written it there
	refusals
)

func (r Refusal) String() string {
	return [refusals]string{"no_key", "not_encrypted", "not_authentic"}[r]
}

// NewRing makes a ring. Without keys it encrypts and decrypts nothing. clear: payloads that are not encrypted are read as well.
// missed is called, and must not block, when a payload names a key that the ring does not have.
func NewRing(tenant string, clear bool, missed func(), keys ...Key) *Ring {
	r := &Ring{tenant: tenant, clear: clear, missed: missed}
	r.Set(keys...)
	return r
}

// Set replaces the keys. What is known of keys that stay is kept.
func (r *Ring) Set(keys ...Key) {
	var next []*Cipher
	for _, k := range keys {
		c := r.Find(k.ID())
		if c == nil {
			c = NewCipher(k)
		}
		next = append(next, c)
	}
	r.ciphers.Store(&next)
}

// First is the cipher that encrypts, nil if the ring is empty.
func (r *Ring) First() *Cipher {
	if list := *r.ciphers.Load(); len(list) > 0 {
		return list[0]
	}
	return nil
}

// Tenant is the name of the tenant.
func (r *Ring) Tenant() string { return r.tenant }

// Find is the cipher with an id, nil if the ring has none.
func (r *Ring) Find(id uint64) *Cipher {
	list := r.ciphers.Load()
	if list == nil {
		return nil
	}
	for _, c := range *list {
		if c.id == id {
			return c
		}
	}
	return nil
}

// Refuse counts a refused payload.
func (r *Ring) Refuse(why Refusal) {
	r.refused[why].Add(1)
	if why == NoKey && r.missed != nil {
		r.missed()
	}
}

// Refused calls do with each reason and its count.
func (r *Ring) Refused(do func(Refusal, uint64)) {
	for why := range r.refused {
		do(Refusal(why), r.refused[why].Load())
	}
}

// Clear says whether payloads that are not encrypted are read as well.
func (r *Ring) Clear() bool { return r.clear }

// String names the tenant and the ids of the keys.
func (r *Ring) String() string {
	if r.First() == nil {
		return fmt.Sprintf("this session in tenant %q has no keys", r.tenant)
	}
	var ids []string
	for _, c := range *r.ciphers.Load() {
		ids = append(ids, IDText(c.id))
	}
	return fmt.Sprintf("this session in tenant %q has key %s", r.tenant, strings.Join(ids, ", "))
}
