// Keys and values in a tree: put, compare and swap, scan in order.
package main

import (
	"context"
	"errors"
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
	t, err := kv.Create(ctx, c, "example/people", btree.Config{})
	if err != nil {
		log.Fatal(err)
	}
	people := map[string]string{"ada": "lovelace", "alan": "turing", "barbara": "liskov", "grace": "hopper"}
	for k, v := range people {
		if err := t.Put(ctx, []byte(k), []byte(v)); err != nil {
			log.Fatal(err)
		}
	}
	v, err := t.Get(ctx, []byte("grace"), nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("grace %s\n", v)

	// Only one of two changes from the same version takes place.
	_, version, err := t.GetVersion(ctx, []byte("ada"), nil)
	if err != nil {
		log.Fatal(err)
	}
	_, err1 := t.PutIf(ctx, []byte("ada"), []byte("king"), btree.IfVersion(version))
	_, err2 := t.PutIf(ctx, []byte("ada"), []byte("byron"), btree.IfVersion(version))
	fmt.Println("first:", err1, "second late:", errors.Is(err2, btree.ErrConflict))

	err = t.Scan(ctx, btree.Range{From: []byte("a"), To: []byte("b")}, func(key, value []byte, _ uint64) bool {
		fmt.Printf("%s %s\n", key, value)
		return true
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := t.Drop(ctx); err != nil {
		log.Fatal(err)
	}
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
