package redis_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/verify/testcluster"
)

func TestAskCLI(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	want := map[string]string{"src/a.go": "package a\n", "empty": "", "big": strings.Repeat("line\r\n\x00", 30_000)}
	for k, v := range want {
		require.NoError(t, tree.Put(t.Context(), redis.AppendKey(nil, 0, []byte(k)), redis.AppendString(nil, []byte(v))))
	}
	values, err := redis.AskCLI(t.Context(), tree, []string{"src/a.go", "empty", "missing", "big"})
	if errors.Is(err, redis.ErrNoCLI) {
		t.Skip(err)
	}
	require.NoError(t, err)
	require.Len(t, values, 4)
	require.Equal(t, want["src/a.go"], string(values[0]))
	require.Equal(t, []byte{}, values[1])
	require.Nil(t, values[2])
	require.True(t, want["big"] == string(values[3]))
}
