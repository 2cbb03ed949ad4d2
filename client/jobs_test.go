package client

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

// A worker serves a job anew when its submitter's grants have changed.
func TestDelegationsDifferByGrants(t *testing.T) {
	of := func(prefixes ...string) *Delegation {
		d := &Delegation{Job: 1, Tenant: "a"}
		for _, p := range prefixes {
			d.grants = append(d.grants, &quarrypb.Grant{Prefix: p, Rights: []quarrypb.Right{quarrypb.Right_RIGHT_WRITE}})
		}
		return d
	}
	require.True(t, of("in/", "out/").Same(of("in/", "out/")))
	require.False(t, of("in/", "out/").Same(of("in/")))
	require.False(t, of("in/").Same(of()))
}
