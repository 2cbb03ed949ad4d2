// A pool set: the memory of a program is a file that a poolset file names, and so is the pool that has a copy of it. Here the file is lost, and made again.
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"os"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
)

const record = 64

func main() {
	if len(os.Args) != 2 {
		log.Fatal("give a poolset file")
	}
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{controller()}})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	set, err := pool.ReadSet(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	m, err := set.Create(ctx, c, pool.Options{}, pool.MemoryOptions{})
	if err != nil {
		log.Fatal(err)
	}
	for _, text := range []string{"opened", "deposit 20"} {
		if err := add(m, text); err != nil {
			log.Fatal(err)
		}
	}
	if err := m.Close(ctx); err != nil {
		log.Fatal(err)
	}

	// The file is lost.
	if err := os.Remove(set.Part.Path); err != nil {
		log.Fatal(err)
	}
	if _, err := set.Restore(ctx, c, "", nil); err != nil {
		log.Fatal(err)
	}
	// From now on Persist waits for the file alone.
	if m, err = set.Open(ctx, c, pool.MemoryOptions{Queue: 1 << 20}); err != nil {
		log.Fatal(err)
	}
	if err := add(m, "withdraw 5"); err != nil {
		log.Fatal(err)
	}
	if err := m.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	r, err := set.Check(ctx, c, nil)
	if err != nil {
		log.Fatal(err)
	}
	memory := m.Bytes()
	for i := range binary.LittleEndian.Uint64(memory) {
		text := memory[record*(i+1):][:record]
		fmt.Printf("%d: %s\n", i, text[1:1+text[0]])
	}
	fmt.Println("the pool has all of it:", r.Same())
	if err := m.Close(ctx); err != nil {
		log.Fatal(err)
	}
	if err := set.Remove(ctx, c); err != nil {
		log.Fatal(err)
	}
}

// add appends a record. A crash at any point leaves the log with it or without it: the number of records is persisted behind it.
func add(m *pool.Memory, text string) error {
	memory := m.Bytes()
	n := binary.LittleEndian.Uint64(memory)
	at := record * (n + 1)
	memory[at] = byte(copy(memory[at+1:at+record], text))
	if err := m.Persist(at, record); err != nil {
		return err
	}
	binary.LittleEndian.PutUint64(memory, n+1)
	return m.Persist(0, 8)
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
