package controller_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/controller"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
)

func goodName(name string) *quarrypb.Name {
	ref, _ := proto.Ref{Addr: proto.MakeAddr(1, 4096), Incarnation: proto.MakeIncarnation(0, 1)}.AppendBinary(nil)
	return &quarrypb.Name{Name: name, Kind: "object", Ref: ref}
}

func TestNames(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	n := do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("a/b")})
	require.NotZero(t, n.Revision)
	require.NotZero(t, n.CreatedUnixS)
	refused(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("a/b")}, connect.CodeAlreadyExists, `"a/b"`)
	refused(t, rpc.LookupName, &quarrypb.LookupNameRequest{Name: "a"}, connect.CodeNotFound, `"a"`)

	moved := goodName("a/b")
	moved.Notes = map[string]string{"k": "v"}
	m := do(t, rpc.SwapName, &quarrypb.SwapNameRequest{Name: moved, Revision: n.Revision})
	require.Greater(t, m.Revision, n.Revision)
	require.Equal(t, n.CreatedUnixS, m.CreatedUnixS)
	refused(t, rpc.SwapName, &quarrypb.SwapNameRequest{Name: moved, Revision: n.Revision}, connect.CodeAborted, "is at revision")
	refused(t, rpc.SwapName, &quarrypb.SwapNameRequest{Name: moved}, connect.CodeAborted, "is at revision")
	refused(t, rpc.SwapName, &quarrypb.SwapNameRequest{Name: goodName("z"), Revision: 1}, connect.CodeNotFound, `"z"`)
	require.Equal(t, map[string]string{"k": "v"}, do(t, rpc.LookupName, &quarrypb.LookupNameRequest{Name: "a/b"}).Notes)
	refused(t, rpc.DeleteName, &quarrypb.DeleteNameRequest{Name: "a/b", Revision: n.Revision}, connect.CodeAborted, "revision")
	do(t, rpc.DeleteName, &quarrypb.DeleteNameRequest{Name: "a/b", Revision: m.Revision})
	refused(t, rpc.DeleteName, &quarrypb.DeleteNameRequest{Name: "a/b"}, connect.CodeNotFound, `"a/b"`)
}

// TestANameUnderASessionNeedsItsProof: serials are a counter, so that knowing one shows nothing.
func TestANameUnderASessionNeedsItsProof(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	open := func(name string) *quarrypb.OpenSessionResponse {
		return do(t, rpc.OpenSession, &quarrypb.OpenSessionRequest{Name: name, Key: publicKey[:]})
	}
	victim, other := open("victim"), open("other")
	serial := victim.Ticket.Serial
	for _, proof := range [][]byte{nil, other.Proof} {
		refused(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("x"), Serial: serial, Proof: proof}, connect.CodePermissionDenied, "proof")
		refused(t, rpc.CreateNames, &quarrypb.CreateNamesRequest{Names: []*quarrypb.Name{goodName("x")}, Serial: serial, Proof: proof}, connect.CodePermissionDenied, "proof")
	}
	refused(t, rpc.LookupName, &quarrypb.LookupNameRequest{Name: "x"}, connect.CodeNotFound, "x")
	do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("x"), Serial: serial, Proof: victim.Proof})
	do(t, rpc.CreateNames, &quarrypb.CreateNamesRequest{Names: []*quarrypb.Name{goodName("y")}, Serial: serial, Proof: victim.Proof})
	n := do(t, rpc.LookupName, &quarrypb.LookupNameRequest{Name: "x"})
	refused(t, rpc.SwapName, &quarrypb.SwapNameRequest{Name: goodName("x"), Revision: n.Revision, Serial: serial, Proof: other.Proof}, connect.CodePermissionDenied, "proof")
	n = do(t, rpc.SwapName, &quarrypb.SwapNameRequest{Name: goodName("x"), Revision: n.Revision, Serial: serial, Proof: victim.Proof})
	do(t, rpc.CloseSession, &quarrypb.CloseSessionRequest{Serial: serial, Proof: victim.Proof})
	refused(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("z"), Serial: serial, Proof: victim.Proof}, connect.CodeFailedPrecondition, "has ended")
	refused(t, rpc.SwapName, &quarrypb.SwapNameRequest{Name: goodName("x"), Revision: n.Revision, Serial: serial, Proof: victim.Proof}, connect.CodeFailedPrecondition, "has ended")
	require.Equal(t, n.Revision, do(t, rpc.LookupName, &quarrypb.LookupNameRequest{Name: "x"}).Revision)
}

func TestNameLimits(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	for text, edit := range map[string]func(*quarrypb.Name){
		"1 to 255 bytes": func(n *quarrypb.Name) { n.Name = strings.Repeat("x", 256) },
		"not 0":          func(n *quarrypb.Name) { n.Name = "" },
		"printable":      func(n *quarrypb.Name) { n.Name = "a\x00b" },
		"kind":           func(n *quarrypb.Name) { n.Kind = strings.Repeat("x", 33) },
		"reference":      func(n *quarrypb.Name) { n.Ref = n.Ref[:15] },
		"not a ref":      func(n *quarrypb.Name) { n.Ref = make([]byte, 16) },
		"at most 16":     func(n *quarrypb.Name) { n.Notes = manyNotes(17, 1) },
		"4096 bytes":     func(n *quarrypb.Name) { n.Notes = manyNotes(2, 2048) },
		"owner":          func(n *quarrypb.Name) { n.Owner = strings.Repeat("x", 256) },
	} {
		n := goodName("n")
		edit(n)
		refused(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: n}, connect.CodeInvalidArgument, text)
	}
	refused(t, rpc.CreateName, &quarrypb.CreateNameRequest{}, connect.CodeInvalidArgument, "no name")
	n := goodName(strings.Repeat("ü", 127))
	n.Notes = manyNotes(16, 253)
	do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: n})
}

func manyNotes(n, size int) map[string]string {
	notes := map[string]string{}
	for i := range n {
		notes[fmt.Sprintf("%02d", i)] = strings.Repeat("v", size)
	}
	return notes
}

func TestListNames(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	for i := range 25 {
		n := goodName(fmt.Sprintf("p/%02d", i))
		if i%2 == 1 {
			n.Kind = "tree"
		}
		do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: n})
	}
	do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("q")})
	list := func(q *quarrypb.ListNamesRequest) (names []string) {
		for {
			resp := do(t, rpc.ListNames, q)
			for _, n := range resp.Names {
				names = append(names, n.Name)
			}
			if !resp.More {
				return names
			}
			q.After = names[len(names)-1]
		}
	}
	require.Len(t, list(&quarrypb.ListNamesRequest{}), 26)
	require.Len(t, list(&quarrypb.ListNamesRequest{Prefix: "p/", Limit: 7}), 25)
	trees := list(&quarrypb.ListNamesRequest{Prefix: "p/", Kind: "tree", Limit: 5})
	require.Len(t, trees, 12)
	require.Equal(t, "p/01", trees[0])
	require.Empty(t, list(&quarrypb.ListNamesRequest{Prefix: "p/", After: "q"}))
	require.Empty(t, list(&quarrypb.ListNamesRequest{Prefix: "none"}))
}

func TestSwapNameIsAtomic(t *testing.T) {
	_, etcd := store(t)
	c, rpc := start(t, controller.Config{Etcd: etcd})
	lead(t, c)
	n := do(t, rpc.CreateName, &quarrypb.CreateNameRequest{Name: goodName("n")})
	var won atomic.Int32
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			if _, err := try(t, rpc.SwapName, &quarrypb.SwapNameRequest{Name: goodName("n"), Revision: n.Revision}); err == nil {
				won.Add(1)
			}
		})
	}
	all.Wait()
	require.EqualValues(t, 1, won.Load())
}
