package slab

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// attempt is one try of an operation at one slab: what it holds, what it has learned, and
// what has become of its commit. An operation that starts again takes a new attempt.
//
// The steps take several attempts together, one round for all of them. A single
// operation is a batch of one. Together they take the path without failures; an attempt
// whose step fails is decided by itself.
type attempt struct {
	object
	// anyKind allows a write-once slab to be changed: Free and repairs.
	anyKind bool
	// index is the object's place in the caller's list.
	index int

	// r is the value of R that this attempt writes. No other attempt writes it while a word or
	// an operation may name it (session ids rest before they are used again). So finding it, or
	// not finding it any more, decides a CAS whose answer was lost.
	r proto.R
	// holder is R as the CAS of this attempt found it: 0 if the attempt took it.
	holder proto.R
	// lost: the chain of the reservation had no answer.
	lost bool
	// seen is what was READ under the reservation, from off on, in the lane's memory: the
	// whole slab, or V alone where a copier has READ the slab before.
	seen []byte
	off  uint64
	// sight is what seen shows; v in it is V of the primary. Invariant: while the attempt
	// holds R, no other session changes V.
	sight
	// backups[i] is V that replica i is expected to have, or was found to have.
	backups [MaxListed]proto.V

	// next is V to commit, and img the image that it names, with its checksum: nil for a
	// tombstone. keep keeps the reservation.
	next proto.V
	img  []byte
	keep bool
	// redo is what is written before V is changed, of a change of a STAGED slab; home, which img is
	// for, is written afterwards.
	redo redo
	// staging is the slab of the staging block that the attempt has borrowed for its shadow, reserved with r;
	// offset 0: none.
	staging proto.Slab
	// encryption is what the payload to commit is encrypted with; nil: it stays as it is.
	encryption *encryption
	// chain and verb say where the last round has the attempt's CAS.
	chain, verb int
	result      result
	err         error // why the result is unknown
}

// result is what has become of a commit.
type result uint8

const (
	// undecided: R is held, or may be. The step is repeated, or the outcome read back.
	undecided result = iota
	// done: V of the primary and of each in-sync backup is changed. R is released, kept
	// because the change asked for it, or left to the fence of a session that has ended.
	done
	// notDone: the change is not in place and never will be, because the epoch ended before
	// it took effect. Nothing is held. The operation may start again.
	notDone
	// unknown: the change may take effect, at most once. The attempt's err says why.
	unknown
)

// answer is the result as an error: nil, errAgain, or the reason why it is unknown.
func (a *attempt) answer() error {
	switch a.result {
	case done:
		return nil
	case notDone:
		return errAgain
	}
	return a.err
}

// outcomeLost sets the result of an attempt of which nothing is under way at the present
// epoch's replicas, and whose outcome can no longer be found out.
func (a *attempt) outcomeLost(err error) {
	a.result, a.err = unknown, fmt.Errorf("%w (%w)", ErrUnknown, err)
}

// unsettled sets the result of an attempt of which verbs may still be under way. It ends
// the session: fence and scrub decide the commit then.
func (l *Lane) unsettled(a *attempt, err error) {
	l.port.EndSession(fmt.Errorf("commit of %v could not be settled: %w", a.ref.Addr, err))
	a.outcomeLost(err)
}

// invariantViolated: a CAS of V or a READ of R saw a value that the protocol rules out.
// It ends the session and touches nothing more.
func (l *Lane) invariantViolated(a *attempt, err error) {
	l.port.EndSession(fmt.Errorf("invariant broken: %w", err))
	a.outcomeLost(err)
}
