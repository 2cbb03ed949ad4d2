package rdma

import (
	"context"
	"errors"
	"time"

	"github.com/quarrystore/quarry/proto"
)

// Outcomes of a chain.
var (
	// ErrRefused: the responder has refused a verb. That verb and those behind it never run. The
	// errors below wrap it, and say why.
	ErrRefused = errors.New("refused by the node")
	// ErrBroken: no answer came. What was posted may have run, and may still run until Reset of
	// the connection has returned nil.
	ErrBroken = errors.New("connection broken")
	// ErrTLS is why a connection was not made: one side requires encryption that the other one does
	// not have. It is always ErrBroken too.
	ErrTLS = errors.New("encryption of the fabric")
)

// Causes of a refusal; each wraps ErrRefused.
var (
	// ErrKey: the window's key is not valid, or no longer: the node serves the region in another
	// epoch, or not at all.
	ErrKey = refusal("access key not valid")
	// ErrBounds: the verb reaches outside of the window.
	ErrBounds = refusal("outside of the window")
	// ErrAlign: an atomic on an address that is not a multiple of 8.
	ErrAlign = refusal("atomic not aligned to 8 bytes")
	// ErrReadOnly: the session may only read.
	ErrReadOnly = refusal("session is read-only")
	// ErrNotPersistent: a persistent FLUSH of memory that is not.
	ErrNotPersistent = refusal("memory is not persistent")
	// ErrLimit: a chain or verb above the limits of this package.
	ErrLimit = refusal("above the limits of a chain")
	// ErrRevoked: the session has been fenced.
	ErrRevoked = refusal("session is revoked")
	// ErrTicket: the ticket is not one of this node's cluster, or is not for what is asked, or
	// the client that shows it does not hold its key.
	ErrTicket = refusal("ticket not valid here")
	// ErrDomain: this provider's atomics would be executed by another unit (processor or adapter)
	// than the one that executes all other atomics on the region.
	ErrDomain = refusal("the region's atomics belong to another domain: a region of an RDMA adapter is reached by verbs or tcp, not by shm")
	// ErrFull: the node has no room for another session or connection. Nothing is wrong with
	// it; there may be room later.
	ErrFull = refusal("the node has no room for another session or connection")
	// ErrMapping: shm hands the memory itself to the process, which could open it for writing
	// (proc(5), /proc/self/map_files).
	ErrMapping = refusal("a read-only session of root or of the node's user may not map the memory: use tcp or verbs")
	// ErrProcess: the node could not take the memory back from the process when its session ends.
	ErrProcess = refusal("the node has no right to look into the client's process and to kill it, so that it could not take the memory back: run both as one user in one pid namespace, or use tcp")
	// ErrUnsupported: a VERIFY where the responder has none; see Window.Verifies. READ the bytes.
	ErrUnsupported = refusal("the responder has no such verb")
)

// Refusals lists the causes in the order of their codes on the wire, from 1.
// Part of the tcp format: append only.
var Refusals = []error{ErrKey, ErrBounds, ErrAlign, ErrReadOnly, ErrNotPersistent, ErrLimit, ErrRevoked, ErrTicket, ErrDomain, ErrFull, ErrMapping, ErrProcess, ErrUnsupported}

// refusalError is a cause of a refusal; it is an ErrRefused.
type refusalError struct{ cause string }

func refusal(cause string) error          { return &refusalError{cause} }
func (e *refusalError) Error() string     { return e.cause }
func (e *refusalError) Is(err error) bool { return err == ErrRefused }

// Conn is one lane's connection to one node, a queue pair. One goroutine at a
// time uses it; Close may be called from any.
type Conn interface {
	// Post sends a chain. It does not wait for the node. Errors are reported
	// by Wait. Several chains of one round may be posted, one for each window; they
	// are executed, and awaited, in the order in which they were posted.
	Post(c *Chain)
	// Wait returns when c, the oldest chain posted and not awaited, has an outcome in
	// c.Err and c.Done, or has none by the deadline (then ErrBroken).
	Wait(c *Chain, deadline int64)
	// Open asks the node for access to its replica of a region under an epoch.
	// Cold path. ErrKey while the node does not serve that epoch.
	Open(ctx context.Context, region uint32, epoch uint64) (Window, error)
	// Reset gives the connection up and makes a new one. When it returns nil,
	// nothing posted on the old one can still run: the responder has said so.
	// Windows stay valid. Reset is the only way to go on after ErrBroken.
	Reset(ctx context.Context) error
	// Provider names the provider: "tcp", "shm", "inproc", "verbs", "sim".
	Provider() string
	// Close gives the connection up without waiting for the node.
	Close() error
}

// Peer is implemented by connections that know which node, and which incarnation of it,
// answered: an address may have been given to another node since it was published.
type Peer interface {
	Peer() (node uint32, incarnation uint64)
}

// Near is implemented by connections whose verbs the client's own processor executes.
type Near interface {
	// Prefetch asks the processor for memory that a verb is about to touch. It has no other
	// effect and no error. If the window is closed it does nothing.
	Prefetch(w *Window, off uint64, bytes int)
}

// Mailbox is the number under which a lane opens its mailbox, which is no region: see package msg. The epoch is a nonce of
// the lane's choice. ErrKey where the node carries no messages.
const Mailbox uint32 = 1<<32 - 1

// Waker is implemented by connections whose verbs run without the node's notice.
type Waker interface {
	// Wake has the node look into the mailbox of a window that this connection has opened.
	Wake(w *Window) error
}

// Sleeper is a Waker that shares the memory of a mailbox with the node, so that threads of both sleep on words of it.
type Sleeper interface {
	Waker
	// Ring wakes the node's thread that sleeps on the low half of the word at off, which the caller has changed before.
	Ring(w *Window, off uint64)
	// Sleep sleeps while the low half of the word at off is seen, until the node has changed the word and woken the thread, but not longer
	// than longest. It may return earlier. false: it has not slept, because too many threads do.
	Sleep(w *Window, off uint64, seen uint32, longest time.Duration) bool
}

// Rights of a session on the windows it opens.
type Rights uint8

const (
	ReadOnly  Rights = 1 // READ alone
	ReadWrite Rights = 2 // every verb
)

// Dialer makes connections of one provider.
type Dialer interface {
	// Dial connects a lane of the credentials' session to the node at addr. A node
	// keeps at most one connection for each session and lane: a second Dial of
	// the same lane first ends the first, and returns when nothing of it can run.
	Dial(ctx context.Context, addr string, as *Credentials, lane uint32) (Conn, error)
	Provider() string
}

// Caps describes what a node's provider and memory can do.
type Caps struct {
	Provider   string       // as Conn.Provider names it
	Domain     proto.Domain // what executes the CAS of the node's regions
	Persistent bool         // a persistent FLUSH survives a loss of power
}
