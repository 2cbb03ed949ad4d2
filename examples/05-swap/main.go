// CompareAndWrite replaces a payload only if it has not changed since it was read.
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
	ref, err := c.Alloc(ctx, []byte("draft"), client.AllocOptions{Capacity: 200})
	if err != nil {
		log.Fatal(err)
	}
	_, info, err := c.ReadInfo(ctx, ref, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("first:", c.CompareAndWrite(ctx, ref, info.Version, []byte("edited by me")))
	err = c.CompareAndWrite(ctx, ref, info.Version, []byte("edited by somebody who is late"))
	fmt.Println("late:", errors.Is(err, client.ErrConflict))

	// ErrUnknown is the third answer: it may have been done, at most once. A READ
	// of the object shows it.
	if errors.Is(err, client.ErrUnknown) {
		if b, err := c.Read(ctx, ref, nil); err == nil {
			fmt.Printf("it is now: %s\n", b)
		}
	}
	if err := c.Free(ctx, ref); err != nil {
		log.Fatal(err)
	}
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
