// A watch delivers the present version of an object, and each later one that it finds, without polling.
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
	door, err := c.Alloc(ctx, []byte("closed"), client.AllocOptions{})
	if err != nil {
		log.Fatal(err)
	}
	w, err := c.Watch(ctx, door)
	if err != nil {
		log.Fatal(err)
	}
	defer w.Close()
	next := func() error {
		state, _, err := w.Next(ctx, nil)
		if err == nil {
			fmt.Printf("%s\n", state)
		}
		return err
	}
	if err := next(); err != nil {
		log.Fatal(err)
	}

	// Another goroutine opens the door. If it did so more often than the watch looks, the latest state would come.
	go func() {
		if err := c.Write(ctx, door, []byte("open")); err != nil {
			log.Fatal(err)
		}
	}()
	if err := next(); err != nil {
		log.Fatal(err)
	}
	if err := c.Free(ctx, door); err != nil {
		log.Fatal(err)
	}
	fmt.Println("freed:", errors.Is(next(), client.ErrFreed))
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
