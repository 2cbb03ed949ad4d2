// A space is a range of virtual addresses, the same at every client, in the memory of storage nodes.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
)

func main() {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{controller()}})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	s, err := space.Create(ctx, c, "example", 2<<20, space.Options{RegionBytes: 1 << 20})
	if err != nil {
		log.Fatal(err)
	}
	// The text lies in two regions; it is written in one round.
	text := s.Base() + 1<<20 - 4
	if _, err := s.Write(ctx, []byte("one address space"), text); err != nil {
		log.Fatal(err)
	}
	for range 3 {
		if _, err := s.Add64(ctx, s.Base(), 1); err != nil {
			log.Fatal(err)
		}
	}

	// Another client finds both at the same addresses.
	other, err := client.Connect(ctx, client.Config{Controllers: []string{controller()}})
	if err != nil {
		log.Fatal(err)
	}
	defer other.Close()
	o, err := space.Open(ctx, other, "example")
	if err != nil {
		log.Fatal(err)
	}
	b := make([]byte, 17)
	_, err = o.ReadAt(b, int64(text))
	n, lerr := o.Load64(ctx, o.Base())
	if err := errors.Join(err, lerr); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s, %d times\n", b, n)
	if err := space.Delete(ctx, c, "example"); err != nil {
		log.Fatal(err)
	}
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
