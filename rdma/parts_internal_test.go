package rdma

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// partsConn is a connection that sends what is behind VERIFYs in another part, as verbs does. It notes posts and waits.
type partsConn struct {
	name string
	log  *[]string
	part int
}

func (c *partsConn) Post(*Chain) { *c.log = append(*c.log, c.name+" part 0") }
func (c *partsConn) Step(*Chain, int64) bool {
	*c.log = append(*c.log, c.name+" answer 0", c.name+" part 1")
	c.part = 1
	return false
}
func (c *partsConn) Wait(*Chain, int64) {
	if c.part == 0 {
		*c.log = append(*c.log, c.name+" answer 0", c.name+" part 1")
	}
	*c.log = append(*c.log, c.name+" answer 1")
}
func (c *partsConn) Open(context.Context, uint32, uint64) (Window, error) { return Window{}, nil }
func (c *partsConn) Reset(context.Context) error                          { return nil }
func (c *partsConn) Provider() string                                     { return "verbs" }
func (c *partsConn) Close() error                                         { return nil }

// A round over two nodes whose chains have a verb behind a VERIFY takes two trips, not three.
func TestPartsBehindVerifyGoSideBySide(t *testing.T) {
	var log []string
	a, b := &partsConn{name: "a", log: &log}, &partsConn{name: "b", log: &log}
	var r Round
	for _, c := range []*partsConn{a, b} {
		ch := r.Chain(&Target{Conn: c, Window: Window{Flush: ReadAfterWrite, Verifies: true}})
		ch.Verify(0, 8, 0)
		ch.Flush(Persistent, 0, 8)
	}
	Do(&r)
	require.Equal(t, []string{"a part 0", "b part 0", "a answer 0", "a part 1", "b answer 0", "b part 1", "a answer 1", "b answer 1"}, log)
}
