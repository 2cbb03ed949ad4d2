// A pool is a copy of a program's memory in the cluster. Here the memory is a file: a log whose records are persisted before the number of them is.
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"os"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/pool"
)

const (
	bytes  = 1 << 20
	record = 64
)

func main() {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{controller()}})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	memory, err := mapped("example.log")
	if err != nil {
		log.Fatal(err)
	}
	want := pool.Attr{Signature: [8]byte{'L', 'O', 'G'}, Major: 1}
	p, err := pool.Create(ctx, c, "example-log", memory, pool.Options{Attr: want})
	if err != nil {
		log.Fatal(err)
	}
	for _, text := range []string{"opened", "deposit 20", "withdraw 5"} {
		if err := add(p, memory, text); err != nil {
			log.Fatal(err)
		}
	}
	if err := p.Close(ctx); err != nil {
		log.Fatal(err)
	}

	// The file is lost. The pool has what was persisted.
	clear(memory)
	if p, err = pool.Open(ctx, c, "example-log", memory, &want); err != nil {
		log.Fatal(err)
	}
	if _, err := p.Restore(ctx, nil); err != nil {
		log.Fatal(err)
	}
	for i := range binary.LittleEndian.Uint64(memory) {
		text := memory[record*(i+1):][:record]
		fmt.Printf("%d: %s\n", i, text[1:1+text[0]])
	}
	if err := p.Close(ctx); err != nil {
		log.Fatal(err)
	}
	if err := pool.Remove(ctx, c, "example-log"); err != nil {
		log.Fatal(err)
	}
}

// add appends a record. A crash at any point leaves the log with it or without it: the number of records is persisted behind it.
func add(p *pool.Pool, memory []byte, text string) error {
	n := binary.LittleEndian.Uint64(memory)
	at := record * (n + 1)
	memory[at] = byte(copy(memory[at+1:at+record], text))
	if err := p.Persist(at, record); err != nil {
		return err
	}
	binary.LittleEndian.PutUint64(memory, n+1)
	return p.Persist(0, 8)
}

// mapped makes a file and maps it.
func mapped(name string) ([]byte, error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.Truncate(bytes); err != nil {
		return nil, err
	}
	return unix.Mmap(int(f.Fd()), 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
