// A job from a program: a plugin, a worker in this process that knows it, a job that
// uses it, and a look at what came out.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/coproc/job"
)

// lengths maps every record to the length of its value.
type lengths struct{}

func (lengths) Map(_ coproc.Env, key, value []byte, emit coproc.Emit) error {
	return emit(key, strconv.AppendInt(nil, int64(len(value)), 10))
}

func main() {
	coproc.Register("lengths", "tells how long values are", func() coproc.Plugin { return lengths{} })
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{controller()}})
	check(err)
	texts, err := kv.Create(ctx, c, "example/texts", btree.Config{})
	check(err)
	check(texts.Put(ctx, []byte("greeting"), []byte("hello")))

	work, end := context.WithCancel(ctx)
	worker := make(chan error)
	go func() { worker <- job.Work(work, job.Config{Client: c}) }()

	jobs, err := job.Open(ctx, c)
	check(err)
	var j *job.Job
	for j == nil { // until the worker is known
		j, _ = jobs.Submit(ctx, job.Spec{Plugin: "lengths", Input: job.Source{Tree: "example/texts"}, Output: "example/lengths"})
	}
	j, err = jobs.Wait(ctx, j.ID)
	check(err)
	out, err := kv.Open(ctx, c, "example/lengths", btree.Config{})
	check(err)
	n, err := out.Get(ctx, []byte("greeting"), nil)
	check(err)
	fmt.Printf("%s: greeting has %s bytes\n", j.State, n)
	end()
	check(<-worker)
	check(texts.Drop(ctx))
	check(out.Drop(ctx))
	check(c.Close())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
