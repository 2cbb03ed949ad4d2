// Many goroutines change one object: Update reads, modifies and writes as one step.
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"os"
	"sync"

	"github.com/quarrystore/quarry/client"
)

func main() {
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{controller()}})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	ref, err := c.Alloc(ctx, make([]byte, 8), client.AllocOptions{})
	if err != nil {
		log.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 100 {
				// The function may run more than once; only its last result counts.
				err := c.Update(ctx, ref, func(old []byte) ([]byte, error) {
					n := binary.LittleEndian.Uint64(old)
					return binary.LittleEndian.AppendUint64(nil, n+1), nil
				})
				if err != nil {
					log.Fatal(err)
				}
			}
		})
	}
	wg.Wait()
	b, err := c.Read(ctx, ref, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(binary.LittleEndian.Uint64(b))
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
