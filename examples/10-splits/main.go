// One process of many, each of which works on a range of a tree: what a Kubernetes Job with indexes starts (job.yaml), or
// any other scheduler. It counts the words of its range; a last step adds the counts up.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"strconv"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

func main() {
	ctx := context.Background()
	run := env("RUN", "example/splits") // the same for all processes of a run, another one for each run
	index, err := strconv.Atoi(env("JOB_COMPLETION_INDEX", "0"))
	if err != nil {
		log.Fatal(err)
	}
	parts, err := strconv.Atoi(env("PARTS", "1")) // .spec.completions
	if err != nil {
		log.Fatal(err)
	}
	c, err := client.Connect(ctx, client.Config{Controllers: []string{env("QUARRY_CONTROLLER", "http://127.0.0.1:7420")}})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	input, err := kv.Open(ctx, c, env("INPUT", "lines"), btree.Config{ReadOnly: true})
	if err != nil {
		log.Fatal(err)
	}
	results, err := kv.OpenOrCreate(ctx, c, run, btree.Config{})
	if err != nil {
		log.Fatal(err)
	}
	splits, err := plan(ctx, input, results, parts)
	if err != nil {
		log.Fatal(err)
	}
	if index >= len(splits) { // a small tree has fewer ranges
		fmt.Printf("part %d of %d: nothing to do\n", index, parts)
		return
	}
	words := 0
	r := btree.Range{From: splits[index].From, To: splits[index].To}
	err = input.Scan(ctx, r, func(_, value []byte, _ uint64) bool {
		words += len(bytes.Fields(value))
		return true
	})
	if err != nil {
		log.Fatal(err)
	}
	// A pod that is started again for the same index counts again, and puts its count into the same key.
	if err := results.Put(ctx, fmt.Appendf(nil, "part/%04d", index), strconv.AppendInt(nil, int64(words), 10)); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("part %d of %d, on %s: %d words\n", index, parts, input.NodeName(splits[index].Node), words)
}

// plan returns the ranges of the run. The first process cuts the tree, and all use its ranges: the tree may change, and ranges that two processes
// have cut at different times need not fit together.
func plan(ctx context.Context, input, results *kv.Tree, parts int) (splits []kv.Split, err error) {
	key := []byte("plan")
	b, err := results.Get(ctx, key, nil)
	if errors.Is(err, btree.ErrNoKey) {
		if splits, err = input.Splits(ctx, btree.Range{}, parts); err != nil {
			return nil, err
		}
		if b, err = json.Marshal(splits); err != nil {
			return nil, err
		}
		if err = results.PutIfAbsent(ctx, key, b); errors.Is(err, btree.ErrKeyExists) { // another process was faster
			b, err = results.Get(ctx, key, nil)
		}
	}
	if err != nil {
		return nil, err
	}
	splits = nil
	return splits, json.Unmarshal(b, &splits)
}

func env(name, missing string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return missing
}
