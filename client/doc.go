// Package client is the Go SDK of Quarry: a session with a cluster, and shared
// objects that are allocated, read, written and freed with one-sided verbs.
//
//	c, err := client.Connect(ctx, client.Config{Controllers: []string{"http://127.0.0.1:7420"}})
//	ref, err := c.Alloc(ctx, []byte("hello"), client.AllocOptions{})
//	b, err := c.Read(ctx, ref, nil)
//	err = c.Write(ctx, ref, []byte("world"))
//	err = c.Free(ctx, ref)
//
// A Client is safe for many goroutines. Each call runs on a lane of its own:
// connections, scratch memory and a magazine of claimed slabs that nobody else
// touches meanwhile.
//
// # Three answers
//
// A call returns nil; or an error that means not done and never will be; or an
// error that wraps ErrUnknown: it may have been done, at most once. The context's
// deadline bounds every call, DefaultTimeout does where it has none.
//
// # Obligations of the caller
//
//  1. Close the Client: it gives back what it holds. A process that dies without
//     Close blocks the slabs it was writing until its lease has run out.
//  2. A Ref is a capability within the tenant: keep it where you keep pointers,
//     or under a name (Names).
//  3. Callbacks do not call the Client and do not keep the slices they are given.
package client
