// A secondary index, kept by a feed: for each person of a tree the city, and for each city its people. The process may be killed at any moment, and
// another one goes on, here or on another host.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"net/url"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// 19-index [synced]: follows until it is interrupted, or until the index has everything that was there when it began.
func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	c, err := client.Connect(ctx, client.Config{Controllers: []string{controller()}, Name: "19-index"})
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	err = follow(ctx, c, len(os.Args) > 1)
	for ; err != nil && ctx.Err() == nil; err = follow(ctx, c, len(os.Args) > 1) {
		log.Print(err) // the session has ended, or the process before this one was killed and is not fenced yet
		time.Sleep(200 * time.Millisecond)
	}
}

// follow keeps the index up to date under one session.
func follow(ctx context.Context, c *client.Client, once bool) error {
	people, err := kv.Open(ctx, c, "people", btree.Config{})
	if err != nil {
		return err
	}
	tree, err := kv.OpenOrCreate(ctx, c, "people/by-city", btree.Config{})
	if err != nil {
		return err
	}
	feed, err := people.Follow(ctx, kv.FeedOptions{State: "people/by-city.state"})
	if err != nil {
		return err
	}
	defer feed.Close()
	// What a process writes that was suspended and replaced by another one does not reach the index.
	bound, cancel := feed.Bound(ctx)
	defer cancel()
	for {
		events, err := feed.Next(ctx)
		if err != nil {
			return err
		}
		synced := false
		for _, e := range events {
			if e.Kind == kv.Synced {
				synced = true
			} else if err := apply(bound, tree, e.Event); err != nil {
				return err
			}
		}
		if err := feed.Ack(ctx, events[len(events)-1].Position); err != nil {
			return err
		}
		if synced && once {
			return nil
		}
	}
}

// apply brings the index to where an event says the person is. The index has two kinds of keys: person/NAME with the city under which the
// person is found, and city/CITY/NAME. No step leaves a city/ key that is not the one its person/ key names, so a process that comes after a kill,
// and gets the event again, or a later one, knows what is there.
func apply(ctx context.Context, tree *kv.Tree, e kv.Event) error {
	person := append([]byte("person/"), e.Key...)
	if len(person) > btree.MaxKeyBytes {
		return nil // the same each time
	}
	was, err := tree.Get(ctx, person, nil)
	if err != nil && !errors.Is(err, btree.ErrNoKey) {
		return err
	}
	var row struct{ City string }
	if e.Kind == kv.Put {
		if err := json.Unmarshal(e.Value, &row); err != nil || len(city([]byte(row.City), e.Key)) > btree.MaxKeyBytes {
			log.Printf("%.40s is not indexed", e.Key)
			row.City = ""
		}
	}
	if len(was) > 0 && !bytes.Equal(was, []byte(row.City)) {
		if err := tree.Delete(ctx, city(was, e.Key)); err != nil && !errors.Is(err, btree.ErrNoKey) {
			return err
		}
	}
	if row.City == "" {
		if err := tree.Delete(ctx, person); err != nil && !errors.Is(err, btree.ErrNoKey) {
			return err
		}
		return nil
	}
	if err := tree.Put(ctx, person, []byte(row.City)); err != nil {
		return err
	}
	return tree.Put(ctx, city([]byte(row.City), e.Key), nil)
}

func city(name, person []byte) []byte {
	return fmt.Appendf(nil, "city/%s/%s", url.PathEscape(string(name)), person)
}

func controller() string {
	if u := os.Getenv("QUARRY_CONTROLLER"); u != "" {
		return u
	}
	return "http://127.0.0.1:7420"
}
