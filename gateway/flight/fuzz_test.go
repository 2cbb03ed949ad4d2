package flight_test

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/gateway/flight"
)

// A command is refused, or selects a range and columns within the limits.
func FuzzCommand(f *testing.F) {
	for _, s := range []string{`{"tree":"users"}`, `{"tree":"t","from":"a","to":"b","columns":["key"],"parts":4}`, `{"tree":"t","prefix_base64":"/w=="}`, `{"tree":"t","value_contains":"x"}`, `{`, `{"tree":1}`, `{"tree":"t"}{}`, `null`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		from, to, columns, err := flight.ParseCommand(b)
		if err != nil {
			return
		}
		require.LessOrEqual(t, len(from), btree.MaxKeyBytes)
		require.LessOrEqual(t, len(to), btree.MaxKeyBytes)
		require.NotEmpty(t, columns)
		require.LessOrEqual(t, len(columns), 3)
		require.False(t, to != nil && len(to) == 0, "no bound is nil")
	})
}

// A ticket whose MAC is right, because its holder has made it, is refused or is exactly what the server writes, with columns that exist.
func FuzzTicket(f *testing.F) {
	for _, s := range []string{`{"v":1,"tree":"t","root":"1:2","columns":["key"],"expires":9}`, `{"v":2}`, `{"v":1,"columns":[],"expires":9}`, `{"v":1,"columns":["x"],"expires":9}`, `{"v":1,"columns":["key"],"expires":-1}`, ``,
		`{"v":1,"tree":"t","root":"1:2","coLumns":["key"],"expires":9}`, `{"v":1,"tree":"t","root":"1:2","columns":["key"],"expires":9}{}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		sealed := flight.SealAs(b)
		if flight.OpenTicket(sealed) != nil {
			return
		}
		require.Regexp(t, `^\{"v":1,"tree":".*"columns":\[("(key|value|version)",?){1,3}\],"expires":[0-9]+\}$`, string(b))
		for i := range sealed {
			bad := bytes.Clone(sealed)
			bad[i] ^= 1
			require.Error(t, flight.OpenTicket(bad), "a bit is changed")
		}
	})
}
