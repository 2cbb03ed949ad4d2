// Package state decides everything that a storage node's agent decides. It is a
// pure machine: commands of controllers and outcomes of I/O come in as events,
// what is to be done goes out as actions, and the same events always give the same
// actions.
//
//	s := state.New(limits, kept, found)
//	actions, err := s.Step(event)
//
// # What only rises
//
// Controllers change, their calls come late and twice. A node obeys a command only
// if its controller's term is at least the highest it has obeyed, and a region's
// epochs only rise:
//
//	   closed            epoch
//	-----|------------------|-------------> epochs of one region
//	     never served again  heard of; nothing later has been
//
// The term, the ended sessions and the cluster are kept in a Kept, a region's epoch
// in its header: a node with files knows them after a restart. What a restarted
// node finds is closed up to the epoch in the header: only a controller that has
// made a new configuration can have it served.
//
// # Adapters
//
// A node may have several adapters. One of them serves a replica during an epoch: the one that Open
// names. The Cut before each Serve ends the access of all adapters that are not retired, so two of them never serve a
// replica at once. AdapterFailed says that an adapter is gone or does not work: nothing is opened there from
// then on, and the Retire that follows ends what it serves. The caller says AdapterRetired when that is done. Only
// then the controllers are told, and give the adapter's regions another epoch at another one. If the Retire
// fails, or no adapter is left, the caller ends the process.
//
// # Obligations of the caller
//
//  1. Steps are taken one at a time.
//  2. Actions are carried out in the order given. After the first that fails the
//     others of the step are not begun.
//  3. A step that answers Host, Open, Close or Drop with actions on a region
//     (Action.Region is set) ends with exactly one Ended event for the region.
//     Until then the machine refuses other commands for it with ErrBusy.
//     Begin is no such action: it starts the program and does not wait for it. The
//     program's end is reported by WorkEnded; the report of a program that was
//     replaced or stopped may come at any later time.
//  4. Save is done, and on stable storage, before what stands behind it.
package state
