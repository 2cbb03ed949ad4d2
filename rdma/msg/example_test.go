package msg_test

import (
	"context"
	"fmt"
	"log"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/quarrystore/quarry/rdma/shm"
)

// A node with a procedure of its own, and a client that calls it, in one process.
func Example() {
	ctx := context.Background()
	cluster, key := [16]byte{1}, keyring.NewSigner([32]byte{2})
	node := host.New(cluster, keyring.NewRing(key.Public()), 1, 1, host.Limits{})
	defer node.Close(ctx)
	node.Handle(1000, func(from *rdma.Ticket, request, answer []byte) (int, error) {
		return copy(answer, fmt.Sprintf("hello, %s of session %d", request, from.Session)), nil
	})
	dialer := shm.NewInproc()
	dialer.Add("node 1", node)

	as := rdma.Issue(key, rdma.Ticket{Cluster: cluster, Session: 7, Serial: 7, Rights: rdma.ReadWrite})
	conn, err := dialer.Dial(ctx, "node 1", as, 0)
	if err != nil {
		log.Fatal(err)
	}
	defer conn.Close()
	buffers, err := rdma.NewArena(msg.BufferBytes)
	if err != nil {
		log.Fatal(err)
	}
	defer buffers.Close()
	c, err := msg.Open(ctx, conn, buffers)
	if err != nil {
		log.Fatal(err)
	}
	answer := make([]byte, msg.MaxPayload)
	n, err := c.Call(ctx, 1000, []byte("Ada"), answer)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(string(answer[:n]))
	// Output: hello, Ada of session 7
}
