// Two clients on two providers share one object: one maps the node's memory, the
// other reaches it over TCP.
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/quarrystore/quarry/client"
)

func main() {
	ctx := context.Background()
	connect := func(transport string) *client.Client {
		c, err := client.Connect(ctx, client.Config{Controllers: []string{controller()}, Transport: transport})
		if err != nil {
			log.Fatal(err)
		}
		return c
	}
	near, far := connect(client.TransportSHM), connect(client.TransportTCP)
	defer near.Close()
	defer far.Close()

	ref, err := near.Alloc(ctx, []byte("ping"), client.AllocOptions{})
	if err != nil {
		log.Fatal(err)
	}
	err = far.Update(ctx, ref, func(old []byte) ([]byte, error) { return append(old, " pong"...), nil })
	if err != nil {
		log.Fatal(err)
	}
	b, err := near.Read(ctx, ref, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", b)
	if err := near.Free(ctx, ref); err != nil {
		log.Fatal(err)
	}
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
