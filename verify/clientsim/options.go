package clientsim

import (
	"io"
	"time"

	"github.com/quarrystore/quarry/client"
)

// Options of one schedule. They follow from the seed; see optionsOf.
type Options struct {
	Regions  int
	Clients  int
	Lanes    int
	Workers  int // goroutines of each client, at most Lanes
	Length   time.Duration
	Objects  int
	Keys     int
	Tree     bool // else objects
	Faults   bool // processes are paused and killed, links are cut
	Spare    bool // clients are not hurt: their sessions last
	Mute     bool // nodes lose the controllers, again and again
	Well     bool // the cluster is well: only clients are hurt
	Eager    bool // commands run all the time
	Deadline bool // calls have short deadlines
	Callback bool // callbacks block
	Collect  bool // kv collect runs beside the clients
	Repair   bool // fsck --repair runs beside the clients
	Loads    bool // trees are loaded all the time, and the sessions that load them end
	Leave    bool // clients are closed while their calls run
	End      bool // sessions are ended by order, and nodes hear of their fences late
	Encrypt  bool // clients encrypt payloads; repairs have no key
	Stuck    bool // nodes do not answer clients for longer than a call has to settle
	Staged   bool // objects and nodes of trees lie in STAGED slabs, with one replica: with Well, or without Faults
	Open     bool // regions have open words, and clients read at all replicas
	Spaces   bool // clients work on a space instead
	Pools    bool // clients take turns as owners of a pool instead
	Watch    bool // clients watch the tree that they change
	Feed     bool // with Watch: they follow it by feeds with stored states
	Sets     bool // a third of the operations reserve several objects
	Names    bool // clients change and follow names instead
	Help     bool // clients have nodes execute changes of objects that others hold
	PerByte  time.Duration

	wildness

	Log io.Writer // of every line; nil: none
}

// replicas of regions, objects and trees.
func (o *Options) replicas() int {
	if o.Staged {
		return 1
	}
	return 2
}

// readFrom is where clients read.
func (o *Options) readFrom() string {
	if o.Open {
		return client.ReadSpread
	}
	return client.ReadNear
}

// slab of mutable objects.
func (o *Options) slab() client.SlabKind {
	if o.Staged {
		return client.StagedSlab
	}
	return client.PairSlab
}

// wildness is what befalls messages.
type wildness struct {
	Late       int // of 1000 messages are up to 300 ms late
	Torn       int // one chain in so many runs in two parts
	LoseAnswer int // one chain in so many gets no answer
	ResetRPC   int // one call in so many loses its answer
	Stall      int // one stream of names in so many stands still after some pushes
}
