package state

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/proto/quarrypb"
)

func tcpEnd(name, address string) *quarrypb.Endpoint {
	return &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_TCP, Rail: name, Address: address}
}

func TestTCPAddresses(t *testing.T) {
	shm := &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_SHM, Address: "/s"}
	for want, ends := range map[string][]*quarrypb.Endpoint{
		" []":     {shm},
		"x []":    {shm, tcpEnd("a", "x")},
		"x [y x]": {tcpEnd("a", "x"), shm, tcpEnd("b", "y")},
	} {
		first, all := tcpAddresses(&quarrypb.Node{Endpoints: ends})
		var got []string
		for _, e := range all {
			got = append([]string{e.Address}, got...)
		}
		require.Equal(t, want, fmt.Sprint(first, " ", got))
	}
}

func TestEndpointsAreChecked(t *testing.T) {
	many := []*quarrypb.Endpoint{}
	for range 16 {
		many = append(many, tcpEnd("", "x"))
	}
	require.Nil(t, checkEndpoints(&quarrypb.Node{Endpoints: many}))
	require.Nil(t, checkEndpoints(&quarrypb.Node{Endpoints: []*quarrypb.Endpoint{tcpEnd("rail-1.a_b", "x"), {Provider: 9, Address: "of a later version"}}}))
	for name, ends := range map[string][]*quarrypb.Endpoint{
		"too many":   append(many, tcpEnd("", "x")),
		"bad name":   {tcpEnd("a b", "x")},
		"long name":  {tcpEnd(strings.Repeat("a", 33), "x")},
		"no address": {tcpEnd("a", "")},
		"nothing":    {{}},
	} {
		err := checkEndpoints(&quarrypb.Node{Endpoints: ends})
		require.NotNil(t, err, name)
		require.Equal(t, Invalid, err.Code, name)
	}
}
