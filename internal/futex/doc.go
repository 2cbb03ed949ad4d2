// Package futex has threads of this process sleep on words of memory that other processes share, and wakes theirs (futex(2), without the
// private flag).
//
//	if t, ok := futex.Take(); ok {
//		futex.Wait(word, seen, longest)
//		t.Give()
//	}
//
// A sleep ends when another process has stored another value and calls Wake. The kernel compares the word with the value that the caller has
// seen while it holds the lock that Wake takes too. So there is no moment between the look and the sleep in which a wake-up is lost.
//
// # What a sleep costs
//
// It holds an operating system thread, unlike a channel or a socket, and for up to 10 ms the Go scheduler may keep one of its GOMAXPROCS
// processors for that thread. If the scheduler keeps all of them, it does not poll the network. So Take bounds the sleeps: at most 64 at a
// time, and fewer than GOMAXPROCS that began in the last 20 ms. A caller whose Take fails waits in another way.
//
// # Obligations of the caller
//
//  1. Bound each sleep: the process at the other end may die between its store and its Wake.
//  2. The memory may be unmapped while a thread sleeps, or before. Package futex never touches the word itself: the kernel answers that there
//     is no word, or sleeps for the time given at most.
package futex
