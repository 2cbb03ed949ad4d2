package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"testing"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// exampleTB lets an example start a cluster, which otherwise ends with a test.
type exampleTB struct {
	testing.TB
	cleanups []func()
}

func (e *exampleTB) Helper()                   {}
func (e *exampleTB) Cleanup(f func())          { e.cleanups = append(e.cleanups, f) }
func (e *exampleTB) Context() context.Context  { return context.Background() }
func (e *exampleTB) Errorf(f string, a ...any) { log.Panicf(f, a...) }
func (e *exampleTB) FailNow()                  { panic("example failed") }
func (e *exampleTB) TempDir() string {
	dir, err := os.MkdirTemp("", "quarry")
	if err != nil {
		panic(err)
	}
	e.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// exampleClient starts a cluster of one node and connects a client. done ends both.
func exampleClient() (c *client.Client, done func()) {
	tb := &exampleTB{}
	cluster := testcluster.New(tb, testcluster.Options{})
	return cluster.Connect(client.Config{}), func() {
		for i := len(tb.cleanups) - 1; i >= 0; i-- {
			tb.cleanups[i]()
		}
	}
}

// The life of an object: allocate, read, write, update, free.
func Example() {
	c, done := exampleClient() // or client.Connect with the URLs of the controllers
	defer done()
	ctx := context.Background()
	ref, err := c.Alloc(ctx, []byte("hello"), client.AllocOptions{Capacity: 100})
	if err != nil {
		log.Fatal(err)
	}
	if err := c.Write(ctx, ref, []byte("hello, world")); err != nil {
		log.Fatal(err)
	}
	err = c.Update(ctx, ref, func(old []byte) ([]byte, error) { return append([]byte("> "), old...), nil })
	if err != nil {
		log.Fatal(err)
	}
	b, err := c.Read(ctx, ref, nil)
	fmt.Println(string(b), err)
	fmt.Println(c.Free(ctx, ref))
	_, err = c.Read(ctx, ref, nil)
	fmt.Println(errors.Is(err, client.ErrFreed))
	// Output:
	// > hello, world <nil>
	// <nil>
	// true
}

// Reserve holds several objects at once: here an amount moves from one to the other. Nobody else changes either of them meanwhile.
func ExampleClient_Reserve() {
	c, done := exampleClient()
	defer done()
	ctx := context.Background()
	from, err1 := c.Alloc(ctx, []byte{100}, client.AllocOptions{})
	to, err2 := c.Alloc(ctx, []byte{0}, client.AllocOptions{})
	if err := errors.Join(err1, err2); err != nil {
		log.Fatal(err)
	}
	held, err := c.Reserve(ctx, from, to)
	if err != nil {
		log.Fatal(err) // nothing is reserved
	}
	defer held.Release()
	a, err1 := held.Read(from, nil)
	b, err2 := held.Read(to, nil)
	if err := errors.Join(err1, err2); err != nil {
		log.Fatal(err)
	}
	a[0], b[0] = a[0]-30, b[0]+30
	// Each object has an answer of its own: one may be written and the other not.
	errs := held.WriteMany(ctx, []client.Ref{from, to}, [][]byte{a, b})
	// nil: nobody else has changed an object of the set from Reserve on.
	if err := errors.Join(errs[0], errs[1], held.Release()); err != nil {
		log.Fatal(err)
	}
	a, err = c.Read(ctx, from, a[:0])
	fmt.Println(a, err)
	b, err = c.Read(ctx, to, b[:0])
	fmt.Println(b, err)
	// Output:
	// [70] <nil>
	// [30] <nil>
}

// CompareAndWrite writes only if the object has not changed since it was read.
func ExampleClient_CompareAndWrite() {
	c, done := exampleClient()
	defer done()
	ctx := context.Background()
	ref, err := c.Alloc(ctx, []byte("one"), client.AllocOptions{})
	if err != nil {
		log.Fatal(err)
	}
	_, info, err := c.ReadInfo(ctx, ref, nil)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(c.CompareAndWrite(ctx, ref, info.Version, []byte("two")))
	err = c.CompareAndWrite(ctx, ref, info.Version, []byte("three"))
	fmt.Println(errors.Is(err, client.ErrConflict))
	// Output:
	// <nil>
	// true
}

// View reads an object without copying it.
func ExampleClient_View() {
	c, done := exampleClient()
	defer done()
	ctx := context.Background()
	ref, err := c.Alloc(ctx, []byte("payload"), client.AllocOptions{})
	if err != nil {
		log.Fatal(err)
	}
	err = c.View(ctx, ref, func(payload []byte) error {
		fmt.Println(len(payload))
		return nil
	})
	fmt.Println(err)
	// Output:
	// 7
	// <nil>
}

// AllocMany and ReadMany work on many objects at once.
func ExampleClient_ReadMany() {
	c, done := exampleClient()
	defer done()
	ctx := context.Background()
	refs, errs := c.AllocMany(ctx, [][]byte{[]byte("a"), []byte("b"), []byte("c")}, client.AllocOptions{})
	fmt.Println(errors.Join(errs...))
	texts := make([]string, len(refs))
	err := c.ReadMany(ctx, refs, func(i int, payload []byte, err error) {
		texts[i] = string(payload)
	})
	fmt.Println(texts, err)
	// Output:
	// <nil>
	// [a b c] <nil>
}

// A name lets other clients find an object.
func ExampleNames() {
	c, done := exampleClient()
	defer done()
	ctx := context.Background()
	ref, err := c.Alloc(ctx, []byte("shared"), client.AllocOptions{})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := c.Names().Create(ctx, "app/root", "object", ref); err != nil {
		log.Fatal(err)
	}
	found, err := c.Names().Lookup(ctx, "app/root")
	if err != nil {
		log.Fatal(err)
	}
	b, err := c.Read(ctx, found.Ref, nil)
	fmt.Println(string(b), err)
	// Output: shared <nil>
}
