// Package host is the responder of the providers that execute verbs on a CPU:
// tcp, shm and inproc. It keeps a region's memory, admits sessions, and runs
// chains in such a way that access can be taken away for certain.
//
//	Access                  one for each node
//	 ├ region  epoch, secret, *Memory          OpenRegion, CloseRegion
//	 └ session by serial                       Fence
//	    └ Lane  one connection                 Admit, Leave
//	       ├ gate page   busy | keys           shared with the client process on shm
//	       └ Runner      executes chains       in the client process on shm
//
// # The gate
//
// A lane marks itself busy, then looks at its gate and at the key of the window,
// then executes, then marks itself idle. A change that takes access away first shuts
// the gate (of a session) or clears the keys (of a region), and then waits until each lane
// that was busy has been idle once. Every one of these
// loads and stores is sequentially consistent (sync/atomic), so one of the two
// sees the other (the store-buffering litmus test, Dekker's argument):
//
//	lane                        change
//	 1  busy = odd               a  key = 0
//	 2  if key == mine           b  if busy is odd, wait until it has changed
//	 3      execute              c  the memory no longer changes under that key
//	 4  busy = even
//
// If 2 saw the key, then 2 came before a, hence 1 before b: the change sees busy
// and waits for 4, which is ordered behind all of 3. If 2 did not see it, nothing
// is executed. busy is a counter, so the change needs not catch a moment of rest:
// a lane that went from one chain to the next has looked the key up again.
//
// On shm the page is mapped into the client, which is trusted to follow this
// protocol for as long as its session lives: it may write under the next key anyway. If it
// stays busy (stopped, swapped out, debugged) it is killed through its pidfd, and the change
// waits for its death. Time alone never completes a change.
//
// The end of a session trusts no word of the page. Fence and EndBelow return when the kernel
// shows no process with the memory that only ended sessions were sent (inspect.go), and
// kill those that keep it (holding.go).
//
// # Obligations of the caller
//
//  1. One goroutine at a time runs, opens windows on and leaves a Lane.
//  2. OpenRegion, CloseRegion and Fence have done nothing certain when they
//     return an error: call again until they return nil.
//
// A chain is refused for the first of these causes that applies: ErrLimit, then
// ErrRevoked or ErrKey; a verb of it for ErrBounds, ErrAlign, ErrReadOnly,
// ErrNotPersistent.
package host
