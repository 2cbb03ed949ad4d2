// Package client is the Go SDK of Quarry. A Client opens a session with a cluster and
// allocates, reads, updates and frees shared objects with one-sided verbs.
//
//	c, err := client.Connect(ctx, client.Config{Controllers: []string{"http://127.0.0.1:7420"}})
//	ref, err := c.Alloc(ctx, []byte("hello"), client.AllocOptions{})
//	b, err := c.Read(ctx, ref, nil)
//	err = c.Write(ctx, ref, []byte("world"))
//	err = c.Free(ctx, ref)
//
// ConfigFromEnvironment returns the configuration that the command quarry would use.
//
// A Client is safe for concurrent use. Each call runs on a lane: a set of connections,
// scratch memory and a magazine of claimed slabs that one call at a time owns.
// Config.Lanes bounds how many calls run at the same time.
//
// # Three answers
//
// A call returns one of three answers:
//
//   - nil: the operation was done.
//   - an error that does not wrap ErrUnknown: the operation was not done and never will be.
//   - an error that wraps ErrUnknown: the operation was done once or not at all. Read the
//     object to find out.
//
// # Contexts
//
// A call checks its context when it starts and between rounds of verbs. If the context has
// ended, the call's error wraps the context's error. The context's deadline also bounds the
// wait for answers; without a deadline Config.Timeout does. If the context ends while a
// change is in flight, the call first learns the outcome of the change or undoes it. That
// takes up to one second longer and closes the call's connection to the storage node. A call
// that cannot finish this in time ends the session; the Client opens another.
//
// # Several objects
//
// Update changes one object by what it has been. Where a change depends on several objects, Reserve holds them together:
//
//	held, err := c.Reserve(ctx, from, to)  // no other client changes them from here on
//	a, err := held.Read(from, nil)
//	b, err := held.Read(to, nil)
//	errs := held.WriteMany(ctx, []client.Ref{from, to}, [][]byte{less(a), more(b)})
//	err = held.Release()                   // nil: and so it was to the end
//
// Each object is written by itself, with one of the three answers: a Held is not a transaction.
//
// # Obligations of the caller
//
//  1. Close the Client. Close gives back the claimed slabs. If a process dies without
//     Close, the slabs it was writing stay reserved until the session is fenced: about
//     0.1 s after the process died, or one lease (3 s by default) after its host died.
//  2. A Ref grants access to its object within the tenant. Store it like a pointer, or
//     register it under a name (Names).
//  3. A callback must not call the Client and must not keep the slices it receives. It may
//     run for any time without delaying a failover. While a callback of Update runs, other
//     writers of that object wait; while any callback runs, freed memory is not reused.
//     The controller may end a session that delays reuse for more than 20 leases (one minute).
//     A Held does as a callback of Update does, until Release.
package client
