// A function of one's own is called on an object, beside the memory that has it: by this program, started as a worker.
//
//	14-call worker --node n1 &
//	14-call
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/worker"
)

func init() {
	coproc.Register("insert", "inserts a line into a sorted list", func() coproc.Plugin { return coproc.Func(insert) })
}

// insert puts a line into a list of lines, in their order, and answers how many there are. Many clients can insert at once: each call is done once,
// and only the line crosses the network.
func insert(list, line []byte) (next, answer []byte, err error) {
	if len(line) == 0 || bytes.ContainsRune(line, '\n') {
		return nil, nil, errors.New("want one line")
	}
	count := bytes.Count(list, []byte("\n")) + 1
	at := 0
	for at < len(list) {
		end := at + bytes.IndexByte(list[at:], '\n')
		if bytes.Compare(list[at:end], line) > 0 {
			break
		}
		at = end + 1
	}
	next = fmt.Appendf(nil, "%s%s\n%s", list[:at], line, list[at:])
	return next, fmt.Append(nil, count), nil
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == "worker" {
		worker.Main()
	}
	ctx := context.Background()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{controller()}})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	list, err := c.Alloc(ctx, nil, client.AllocOptions{Capacity: 1000})
	if err != nil {
		log.Fatal(err)
	}
	for _, line := range []string{"stone", "granite", "water"} {
		answer, err := coproc.Call(ctx, c, list, "insert", []byte(line))
		for errors.Is(err, client.ErrNoFunction) { // until the worker is there
			time.Sleep(50 * time.Millisecond)
			answer, err = coproc.Call(ctx, c, list, "insert", []byte(line))
		}
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s lines\n", answer)
	}
	_, err = coproc.Call(ctx, c, list, "insert", nil)
	fmt.Println("refused:", errors.Is(err, client.ErrFunction))
	all, err := c.Read(ctx, list, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s", all)
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
