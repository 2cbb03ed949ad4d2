// Package verbs is the fabric over RDMA adapters: reliable connected queue pairs
// of libibverbs, connected through librdmacm, driven through a small C shim. It is built with cgo and the tag
// "verbs"; otherwise Dial and NewServer answer with ErrNotBuilt.
//
//	client                                    node
//	  Dialer  device, protection domain         Server  device, drains queue
//	   └ conn  one lane                          ├ listener of the connection manager
//	      ├ socket: hello, open, end             ├ domain  one for each tenant
//	      ├ connection id: claim                 ├ region  a memory region of its tenant's domain
//	      └ queue pair ── READ WRITE CAS FAA ──  └ lane    socket, queue pair, connection id
//	                      FLUSH, or SEND to ask
//	                      processors for it, or
//	                      to have them run a chain
//
// The socket (tcp) carries the ticket, which 56 bytes of private data could not hold,
// and its answer a nonce. The request to connect that has this nonce gets the queue pair
// that was made for the ticket. Afterwards windows are opened over the socket, and its end
// tells each side that the other is gone. The data path is the queue pair alone: no thread
// of the node takes part, but in what it is asked to flush, and in chains with an atomic where
// its processors execute those: see act.go.
//
// # Taking access away
//
// A lane ends in four steps: its queue pair goes to the error state; the flush
// completion of a receive that was posted before is awaited, because the change of
// state alone is not a fence; the queue pair is destroyed; then the node sends the farewell.
// The keys of a region end with its memory regions: deregistration returns when
// the adapter has let go of the memory. Where the device is seen to enforce windows of
// type 2B, each lane has one onto each region instead; a window ends by its
// invalidation, and the memory stays registered until it is unmapped.
//
// # Removal
//
// A device that is removed or fails ends all lanes of its dialers. Servers say so by Err: their
// process has to end, because no session can be fenced any more.
//
// # Keys
//
// Window.Key is a number of the session and the epoch, as on the other providers, and is
// checked by the client's end. What the adapter checks are the protection
// domain, which is the tenant's, and a 32-bit key that the client's end holds beside it.
//
// # Buffers
//
// Memory given to Dialer.Register, such as an Arena, is registered with the device
// in pieces when first used. Other buffers are copied through memory of the
// lane, which costs the copy; Stats counts them.
package verbs
