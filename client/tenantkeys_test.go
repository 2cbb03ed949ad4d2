package client

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTenantOfKeysIsNotGuessed: keys of another tenant are not used because a controller names none, or a wrong one.
func TestTenantOfKeysIsNotGuessed(t *testing.T) {
	for _, c := range []struct {
		keys          Keys
		asked, named  string
		tenant, error string
	}{
		{KeyFile("f"), "", "shop", "shop", ""},
		{KeyFile("f"), "shop", "shop", "shop", ""},
		{KeyFile("f"), "shop", "", "shop", ""},
		{KeyFile("f"), "", "", "", "--tenant"},
		{KeyFile("f"), "shop", "bank", "", `in "bank"`},
		{nil, "", "", "default", ""},
	} {
		tenant, err := Config{Keys: c.keys, Tenant: c.asked}.tenantOfKeys(c.named)
		if c.error != "" {
			require.ErrorContains(t, err, c.error)
		} else {
			require.NoError(t, err)
		}
		require.Equal(t, c.tenant, tenant)
	}
}

// badKeys are those of a key management service that does not work.
type badKeys []PayloadKey

func (b badKeys) PayloadKeys(context.Context, string) ([]PayloadKey, error) { return b, nil }

func TestBadKeysAreRefused(t *testing.T) {
	for what, k := range map[string]badKeys{"0 keys": {}, "65 keys": make(badKeys, 65), "a key of zeros": {{1}, {}}} {
		_, err := (&Client{cfg: Config{Keys: k}}).askKeys(t.Context(), "shop")
		require.ErrorContains(t, err, what)
		require.ErrorContains(t, err, `tenant "shop"`)
	}
}
