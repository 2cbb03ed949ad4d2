package job_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/coproc/job"
	"github.com/quarrystore/quarry/coproc/plugins/words"
	"github.com/quarrystore/quarry/gateway/redis"
)

// tell sends lines to a gateway over the tree and waits until all are answered.
func (r *rig) tell(tree *kv.Tree, lines ...string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(r, err)
	ctx, cancel := context.WithCancel(r.Context())
	ended := make(chan error, 1)
	go func() { ended <- redis.New(redis.Config{Tree: tree}).Serve(ctx, l) }()
	c, err := net.Dial("tcp", l.Addr().String())
	require.NoError(r, err)
	_, err = io.WriteString(c, strings.Join(lines, "\r\n")+"\r\nQUIT\r\n")
	require.NoError(r, err)
	answers, err := io.ReadAll(c)
	require.NoError(r, err)
	require.NotContains(r, string(answers), "-ERR")
	cancel()
	require.NoError(r, <-ended)
}

// A job reads what Redis clients have written: strings of one database, without
// those that have expired, and nothing else.
func TestRedisStringsAreInput(t *testing.T) {
	r := newRig(t)
	r.worker("a", nil)
	r.tell(r.tree("cache", nil),
		"SET a 'one two two'", "SET b three EX 10000", "SET c four PXAT 1", "HSET h f five", "ZADD z 6 six",
		"SELECT 3", "SET a 'seven seven'", "SET b eight", "SET c nine", "SELECT 15", "SET x ten")
	for i, want := range []struct {
		from, to string
		source   string
		counts   map[string]string
	}{
		{"", "", "redis:cache", map[string]string{"one": "1", "two": "2", "three": "1"}},
		{"", "", "redis:cache#15", map[string]string{"ten": "1"}},
		{"b", "", "redis:cache#3", map[string]string{"eight": "1", "nine": "1"}},
		{"", "b", "redis:cache#3", map[string]string{"seven": "2"}},
		{"", "", "redis:cache#4", map[string]string{}},
	} {
		in, err := job.ParseSource(want.source)
		require.NoError(t, err)
		in.From, in.To = []byte(want.from), []byte(want.to)
		out := fmt.Sprintf("counts%d", i)
		r.done(job.Spec{Plugin: words.Name, Input: in, Output: out})
		require.Equal(t, want.counts, r.read(out), want.source)
	}
}
