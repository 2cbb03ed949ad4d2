// A space in the memory of a program: plain loads and stores, whose pages a pager serves.
package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/client/vmm"
)

func main() {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{controller()}})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	s, err := space.Create(ctx, c, "example-memory", 8<<20, space.Options{RegionBytes: 1 << 20})
	if err != nil {
		log.Fatal(err)
	}
	// The pager of this host is started if there is none: quarry pager.
	m, err := vmm.Map(ctx, s, s.Base(), s.Bytes(), vmm.Release, vmm.Options{})
	if err != nil {
		log.Fatal(err)
	}
	b := m.Bytes()
	fmt.Printf("%p is %#x\n", b, s.Base())

	// Stores. Do turns a page that cannot be had into an error; otherwise it would end the program.
	if err := m.Do(func() {
		for at := 0; at < len(b); at += vmm.PageBytes {
			copy(b[at:], "a page")
		}
	}); err != nil {
		log.Fatal(err)
	}
	// Behind Release every client finds them.
	if err := m.Release(ctx, m.Base(), s.Bytes()); err != nil {
		log.Fatal(err)
	}
	text := make([]byte, 6)
	_, err = s.ReadAt(text, int64(s.Base()+7<<20))
	// Behind Acquire loads find what other clients have written.
	_, werr := s.WriteAt([]byte("a new page"), int64(s.Base()))
	_, aerr := m.Acquire(ctx, m.Base(), s.Bytes())
	if err := errors.Join(err, werr, aerr); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s, %s\n", text, b[:10])
	if err := errors.Join(m.Close(), space.Delete(ctx, c, "example-memory")); err != nil {
		log.Fatal(err)
	}
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
