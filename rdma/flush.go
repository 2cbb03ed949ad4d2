package rdma

import "fmt"

// FlushMethod is how a persistent FLUSH of a window is carried out. A node chooses one for its memory and tells it when it
// opens a window; see host.ChooseFlush. They differ in what makes a range durable, and when.
type FlushMethod uint8

const (
	// NoFlush: the memory does not survive a loss of power. A persistent FLUSH is refused.
	NoFlush FlushMethod = iota
	// Native: the node's adapter has a FLUSH verb. Durable when that has completed.
	Native
	// ReadAfterWrite: a READ within the range, behind the WRITEs of the same queue pair, pushes them out of adapter and PCI
	// Express into memory that survives. Durable when the READ has completed, but only where what the adapter writes goes
	// past the processors' caches, or these survive.
	ReadAfterWrite
	// Message: the node's processors write the lines of the range back when they are asked. Durable when the node answers.
	Message
	// Processor: the processor that stores, in the client's process, writes the lines of the range back itself. Durable after
	// its fence.
	Processor
	flushMethods
)

// String is the name that flags, status and metrics have.
func (m FlushMethod) String() string {
	if m >= flushMethods {
		return fmt.Sprintf("flush method %d", uint8(m))
	}
	return [...]string{"none", "native", "appliance", "agent", "processor"}[m]
}

// LeftToLater says whether a persistent FLUSH, at a place of a chain, may be left to the next persistent FLUSH behind it: one
// step then makes the ranges of both durable. It may not where something between them is ordered behind the first.
func LeftToLater(verbs []Verb, at int) bool {
	for i := at + 1; i < len(verbs); i++ {
		v := &verbs[i]
		if v.Fence || v.Op == Read || v.Op == Verify {
			return false
		}
		if v.Op == Flush && v.Kind == Persistent {
			return true
		}
	}
	return false
}

// FlushMethodOf reads a method from the wire. Memory that is persistent by a method of another version is flushed by message,
// which every node serves.
func FlushMethodOf(persistent bool, m byte) FlushMethod {
	switch {
	case !persistent:
		return NoFlush
	case m == 0 || FlushMethod(m) >= flushMethods:
		return Message
	}
	return FlushMethod(m)
}
