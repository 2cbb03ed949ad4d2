package slab

import (
	"fmt"

	"github.com/quarrystore/quarry/proto"
)

// attempt is one try of an operation at one slab: what it holds, what it has learned, and the
// outcome of its commit. An operation that starts again takes a new attempt.
//
// The steps of the protocol take several attempts together and send one round for all of them; a
// single operation is a batch of one. Where a step fails for an attempt, that attempt is settled
// by itself.
type attempt struct {
	object
	// anyKind allows the operation at a write-once slab: Free and repairs set it.
	anyKind bool
	// marked is the version of the mark that the operation takes away; 0: it changes no slab that is BAD.
	marked uint64
	// chosen is the version of the change, where it was chosen with a look at all replicas (unmark); 0: nextVersion
	// and nextTombstone choose it.
	chosen uint64
	// byHalf allows the reservation to READ the half of a PAIR slab alone that is expected to hold the active image.
	byHalf bool
	// part is what the reservation has READ.
	part seenPart
	// index is the object's place in the caller's list.
	index int

	// r is the value of R that this attempt writes. No other attempt writes it while a word or an
	// operation may name it (session ids rest before they are used again). So if a READ finds it
	// in R, the attempt's CAS of R has taken effect; if it does not, the CAS has not, or R was
	// released.
	r proto.R
	// holder is R as this attempt's CAS found it; 0: the attempt holds the slab.
	holder proto.R
	// lost: the chain that was to reserve the slab had no answer.
	lost bool
	// leased: the lease was valid when the READ had been answered, which the answer to the operation is drawn from.
	leased bool
	// seen is what was READ under the reservation, from off on, in the lane's memory: the
	// whole slab, but for what part leaves out, or V alone where a copier has READ the slab before.
	seen []byte
	off  uint64
	// sight is what seen shows; v in it is V of the primary. Invariant: while the attempt
	// holds R, no other session changes V.
	sight
	// backups[i] is the V that replica i is expected to have, and its next CAS expects. An answer
	// that shows another V replaces it. backups[0], of the primary, is used where words may be open.
	backups [MaxListed]proto.V

	// next is the V to commit. img is the image that next names, with its checksum; nil: next is
	// a tombstone. keep: the reservation is kept behind the commit, as a claim.
	next proto.V
	img  []byte
	keep bool
	// redo is what is written before V of a STAGED slab is changed. Its img is for home, and is
	// written behind V.
	redo redo
	// staging is the slab of the staging block that the attempt has borrowed for its shadow, and
	// reserved with r; offset 0: none.
	staging proto.Slab
	// encryption is what the new payload is encrypted with; nil: it is written as it is.
	encryption *encryption
	// reread: the result was READ back in a later epoch.
	reread bool
	// chain and verb are the indexes of the attempt's CAS in the last round.
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

// outcomeLost sets the result to unknown. None of the attempt's verbs is under way at a replica
// of the present epoch, and nothing that can be READ tells any more what they did.
func (a *attempt) outcomeLost(err error) {
	a.result, a.err = unknown, fmt.Errorf("%w (%w)", ErrUnknown, err)
}

// unsettled sets the result to unknown where verbs of the attempt may still be under way. It ends
// the session, so that fence and scrub decide whether the commit takes effect.
func (l *Lane) unsettled(a *attempt, err error) {
	l.EndSession(fmt.Errorf("commit of %v could not be settled: %w", a.ref.Addr, err))
	a.outcomeLost(err)
}

// invariantViolated: a CAS of V or a READ of R saw a value that the protocol rules out.
// It ends the session and touches nothing more.
func (l *Lane) invariantViolated(a *attempt, err error) {
	l.EndSession(fmt.Errorf("invariant broken: %w", err))
	a.outcomeLost(err)
}
