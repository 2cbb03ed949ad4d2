// Read and write many objects at once: a batch shares its round trips.
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
	c, err := client.Connect(ctx, client.Config{Controllers: []string{controller()}})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	var refs []client.Ref
	var payloads [][]byte
	for i := range 64 {
		ref, err := c.Alloc(ctx, make([]byte, 16), client.AllocOptions{})
		if err != nil {
			log.Fatal(err)
		}
		refs, payloads = append(refs, ref), append(payloads, fmt.Appendf(nil, "object %d", i))
	}
	// Each object has an answer of its own: one may fail and the others not.
	for i, err := range c.WriteMany(ctx, refs, payloads) {
		if err != nil {
			log.Fatalf("object %d: %v", i, err)
		}
	}
	before := c.Stats().Kinds["read_many"].Rounds
	bytes := 0
	err = c.ReadMany(ctx, refs, func(i int, payload []byte, err error) {
		if err != nil {
			log.Fatalf("object %d: %v", i, err)
		}
		bytes += len(payload)
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d objects, %d bytes, %d round\n", len(refs), bytes, c.Stats().Kinds["read_many"].Rounds-before)
	for _, ref := range refs {
		if err := c.Free(ctx, ref); err != nil {
			log.Fatal(err)
		}
	}
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
