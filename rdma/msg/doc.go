// Package msg carries calls to a node, and their answers, as plain WRITEs and READs of a mailbox: one-sided verbs that a
// program of the node looks at (US 2017/0149890 [0087], [0227], [0230]-[0240], FIG. 9).
//
//	c, err := msg.Open(ctx, conn, buffers)
//	n, err := c.Call(ctx, msg.Echo, request, answer)
//
// Nodes name their procedures with host.Access.Handle.
//
// # The mailbox
//
// A lane of a session has one, which the node makes when the lane opens the window rdma.Mailbox, with a nonce of the client's
// choice. No other session has a key of it. All words are of the WRITE class: no atomic ever touches one.
//
//	     0  page of words     64 asleep: not 0 while the node has to be woken, the number of its sleep; bit 63: a thread sleeps
//	                         128 bell: the sleep of a thread that the client has ended last
//	                         192 answered: rises with each answer where the node wakes clients, else 0
//	                         256 listens: number of the latest time that the client was about to sleep
//	  4096  ring of requests  16 slots of 4096 bytes, written by the client
//	 69632  ring of answers   16 slots of 4096 bytes, written by the node
//	135168  end
//
// A slot, little endian:
//
//	   0 checksum   XXH3-64 of what follows up to the end of the payload; requests and answers have seeds of their own
//	   8 cookie     attempt:24 | sequence:40
//	  16 procedure  2 bytes
//	  18 status     2 bytes; 0 in a request; of an answer: 0 done, 1 no such procedure, 2 the payload is the text of an error
//	  20 bytes      4 bytes, of the payload, at most 4064
//	  24 payload
//	4088 valid      the cookie once more, when all of the slot is there
//
// The attempt is the low 24 bits of the nonce, the sequence rises with each call and never comes back; its remainder by 16 is
// the slot. So no answer to another call, another mailbox or an earlier connection is taken for the one awaited. What is
// longer than a payload stays in slabs, which the request names.
//
// # A call
//
//	client                                             node
//	 1  WRITE slot up to the payload's end
//	 2  WRITE valid                                     a  load valid: a cookie that was not executed
//	 3  READ asleep; not 0: wake the node               b  copy the slot, look at the checksum
//	                                                    c  executed[slot] = cookie, then execute
//	                                                    d  store the answer up to the payload's end
//	                                                    e  store the answer's valid
//	 4  READ the answer's valid: the cookie
//	 5  READ the answer
//
// 1 to 5 are one chain, and the order of a chain is the contract: everything behind a WRITE is ordered after it, and a READ is
// ordered after anything. If a sees 2, then b sees all of 1; if 4 sees e, then 5 sees all of d. 4 and 5 are repeated until the
// answer is there. Where the node's process executes the chains (tcp, inproc) it serves the mailbox between 2 and 3, and a call
// is one round trip. Over shm the client's process executes them: the node looks for requests for 20 us after the last one,
// then stores asleep, looks once more, and waits to be woken. The client stores valid, then reads asleep; the node stores
// asleep, then loads valid: one of the two sees the other. Over verbs the two adapters execute the chains, the node looks in
// the same way, and a WRITE with immediate data wakes it. A client wakes the node once between two times that the node takes note of it: a
// second WRITE with immediate data would find no receive at the node as long as its processors have not come to the first one. A
// message that asks for a FLUSH may still come right behind one, and so may the first one behind a Reopen: the node has one receive for
// a lane, and the client's adapter sends what finds none again until there is one (RNR).
//
// # Sleeps in threads
//
// Over shm both processes have the page of words, so that a thread can sleep on one of them in the kernel (package internal/futex), and a system
// call of the other process ends the sleep. The node sleeps on bell, the client on answered:
//
//	client                                             node
//	   WRITE slot, WRITE valid                         store asleep = number of the sleep, with bit 63
//	   READ asleep; bit 63:                            load the valid words: a request ends the sleep
//	   WRITE bell = the number                         load bell; the number ends the sleep
//	   wake who sleeps on bell                         sleep while bell is what was loaded
//
//	   WRITE listens = another number                  store an answer, and its valid
//	   READ answered                                   store answered
//	   READ the answer's valid, READ the answer        load listens; a number that was not seen yet:
//	   no answer: sleep while answered is what was read   wake who sleeps on answered
//
// No wake-up is lost. If the node's look at the valid words misses a request, then the client's READ of asleep finds the sleep, as above, and its
// WRITE of bell comes before its wake: either the node loads the number, or the kernel finds another word than was loaded, or the thread
// sleeps already when it is woken. If the node's load of listens misses the number, the answer was there before the WRITE of listens, and
// the READ behind that finds it. If the load finds the number, answered was stored before: either the READ of answered comes after that, and
// the READ of valid behind it finds the answer, or the kernel finds another word than was read, or the thread sleeps when it is woken.
//
// A client that has woken a thread sleeps at once: before that thread runs no look finds an answer. Otherwise it looks as often as takes some 20 us
// first. Bit 63 is for clients that know it; another one wakes the node in the way of the provider, and that ends the sleep of a thread too. A client
// sleeps for 10 ms at a time, the node for a second, and then in the way of the provider. Threads are bounded: who gets none waits as over other providers.
//
// The client fetches its answer, and the node writes into no client's memory: a fence has to stop nothing on the node's side
// but the procedures. Fetching is also what scales, as an adapter serves more READs than it starts WRITEs (Su et al., RFP,
// EuroSys 2017).
//
// # At most once
//
// A client sends a call again only behind a Reset of the connection, with the same cookie.
//
// Invariant: a cookie enters the node's executed once, before its procedure runs. executed never falls, and lives as long as
// the mailbox, which outlives connections. So a call is executed once at most.
//
// Invariant: an answer stays in its slot until the client has used the slot for a later call. So a call that is sent again
// finds its answer, the latest 16 of a lane.
//
// Invariant: between the end of a connection and the next nothing is executed, and the node then gives up what it has not
// executed. So a call that the client does not send again is settled by Reset: it has run, or never will.
//
// A node that was restarted has another key for the mailbox, also under the same nonce: what is sent again is refused, and
// what was under way stays unknown. A fence of the session ends its mailboxes: when it returns, no procedure of the session
// runs.
//
// Linearizes at: a call, where its procedure says; the decision that it is executed, at c; that it never will be, where the
// node gives it up in Resume.
//
// # Held calls
//
// A procedure that has no answer yet returns ErrHeld: Serve asks it again, each time that it is called. Over tcp the chain that
// looks for the answer waits at the node (host.Lane.AwaitHeld), and the client sleeps meanwhile. The other providers refuse such calls, because
// their client would have to look again and again. Resume refuses a held call. Watch is the procedure that is held.
//
// # Limits
//
// 16 calls are under way on a lane; the next one is ErrBusy, and not sent. A node has 1024 mailboxes of 132 KiB (host.Limits),
// ErrFull beyond. What a correct client does not write (a wrong checksum under a valid word, a cookie that falls, a length
// above 4064) ends the lane and counts as an offence of the session.
//
// # Obligations of the caller
//
//  1. A Client belongs to the goroutine that owns its connection. Call may Reset it: no other chain is posted meanwhile.
//  2. An error that is ErrUnknown leaves the call at "once, or not at all". Reset of the connection settles it; the state
//     that the procedure changes then tells which.
//  3. A procedure is short: a fence of its session waits for its end, and so do the lane's other requests.
//
// Messages need a session that may write.
package msg
