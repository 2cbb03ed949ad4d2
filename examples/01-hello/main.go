// Allocate an object, read it, replace it, free it.
package main

import (
	"context"
	"errors"
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

	// A Ref names the object for ever: keep it where you would keep a pointer.
	ref, err := c.Alloc(ctx, []byte("hello"), client.AllocOptions{})
	if err != nil {
		log.Fatal(err)
	}
	b, err := c.Read(ctx, ref, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", b)

	if err := c.Write(ctx, ref, []byte("world")); err != nil {
		log.Fatal(err)
	}
	// Read appends to the slice it is given: one buffer serves many reads.
	if b, err = c.Read(ctx, ref, b[:0]); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", b)

	if err := c.Free(ctx, ref); err != nil {
		log.Fatal(err)
	}
	_, err = c.Read(ctx, ref, nil)
	fmt.Println(errors.Is(err, client.ErrFreed))
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
