// Names lead other programs to an object; they live with the controllers.
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
	ref, err := c.Alloc(ctx, []byte("settings, first edition"), client.AllocOptions{})
	if err != nil {
		log.Fatal(err)
	}
	n, err := c.Names().Create(ctx, "example/settings", "object", ref)
	if err != nil {
		log.Fatal(err)
	}
	_, err = c.Names().Create(ctx, "example/settings", "object", ref)
	fmt.Println("twice:", errors.Is(err, client.ErrNameExists))

	// A new object takes the name over, if no other client has done so meanwhile.
	next, err := c.Alloc(ctx, []byte("settings, second edition"), client.AllocOptions{})
	if err != nil {
		log.Fatal(err)
	}
	if n, err = c.Names().Swap(ctx, n.Name, n.Revision, next); err != nil {
		log.Fatal(err)
	}
	b, err := c.Read(ctx, n.Ref, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s: %s\n", n.Name, b)

	if err := errors.Join(c.Names().Delete(ctx, n.Name, n.Revision), c.Free(ctx, ref), c.Free(ctx, next)); err != nil {
		log.Fatal(err)
	}
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
