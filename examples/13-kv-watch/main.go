// A watch of a tree delivers the keys with a prefix, and then each change of them, by whichever client, without polling.
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

func main() {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{controller()}})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	home, err := kv.OpenOrCreate(ctx, c, "example/home", btree.Config{})
	if err != nil {
		log.Fatal(err)
	}
	must := func(err error) {
		if err != nil {
			log.Fatal(err)
		}
	}
	must(home.Put(ctx, []byte("room/lamp"), []byte("off")))
	w, err := home.Watch(ctx, kv.WatchOptions{Prefix: []byte("room/")})
	must(err)
	defer w.Close()
	next := func() {
		e, err := w.Next(ctx)
		must(err)
		switch e.Kind {
		case kv.Put:
			fmt.Printf("%s is %s\n", e.Key[len("room/"):], e.Value)
		case kv.Delete:
			fmt.Printf("%s is gone\n", e.Key[len("room/"):])
		case kv.Synced:
			fmt.Println("watching")
		}
	}
	next() // what is there
	next() // that was all
	must(home.Put(ctx, []byte("room/lamp"), []byte("on")))
	next()
	must(home.Delete(ctx, []byte("room/lamp")))
	next()
	must(home.Drop(ctx))
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
