package host

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/rdma"
)

// What a node may be asked for by --flush.
const (
	FlushAuto      = "auto"
	FlushNative    = "native"
	FlushAppliance = "appliance"
	FlushAgent     = "agent"
)

// DDIO is where an adapter's WRITEs go first: Intel's name for WRITEs into the processors' caches.
type DDIO uint8

const (
	DDIOUnknown DDIO = iota // counts as on
	DDIOOn                  // into the caches: a READ behind them finds them there
	DDIOOff                 // to the memory controller: a READ behind them has pushed them into it
)

// String is the word that status shows.
func (d DDIO) String() string { return [...]string{"unknown", "on", "off"}[d] }

// FlushFacts is what a node has seen of its memory and its adapter.
type FlushFacts struct {
	Persistent bool  // the memory survives a loss of power once flushed
	Adapter    bool  // an adapter executes the verbs; else processors do
	Processors bool  // processors execute the chains that have an atomic, and all others the adapter
	NotNative  error // why the adapter does not make this memory durable by a FLUSH of its own; nil: it does
	Caches     bool  // a loss of power keeps the processors' caches: eADR
	DDIO       DDIO  // of the adapter's WRITEs
	Pages      bool  // a range is durable only when the kernel has written its pages: no adapter can do that
}

// ChooseFlush is the method that a node tells clients which come through its adapter, or the one of its processors if it has
// none. auto takes only what the facts prove. Asking for appliance is the operator's word that the adapter's WRITEs go past
// the caches where the node cannot see it.
func ChooseFlush(want string, f FlushFacts) (rdma.FlushMethod, error) {
	switch want {
	case "", FlushAuto:
		return f.best(), nil
	case FlushNative, FlushAppliance, FlushAgent:
	default:
		return 0, fmt.Errorf("--flush %s: want auto, native, appliance or agent", want)
	}
	var err error
	switch {
	case !f.Persistent:
		err = errors.New("the memory of this node does not survive a loss of power: give --data a device DAX")
	case !f.Adapter:
		err = errors.New("this node serves no RDMA, and its processors flush: leave it out")
	case want == FlushAgent:
		return rdma.Message, nil
	case f.Pages:
		err = errors.New("a range is durable here when the kernel has written its pages (msync), which no adapter has it do: ask for agent")
	case f.Processors && !f.Caches:
		err = errors.New("processors execute the atomics of this node's regions, and what they store stays in their caches, out of which no adapter pushes it: ask for agent")
	case want == FlushNative && f.NotNative == nil:
		return rdma.Native, nil
	case want == FlushNative:
		err = f.NotNative
	case f.DDIO == DDIOOn && !f.Caches:
		err = errors.New("WRITEs of the adapter go into the processors' caches (DDIO), out of which no READ pushes them: switch that off for its root port, or ask for agent")
	default:
		return rdma.ReadAfterWrite, nil
	}
	return 0, fmt.Errorf("--flush %s: %w", want, err)
}

// best is the cheapest method that makes a range durable under these facts.
func (f FlushFacts) best() rdma.FlushMethod {
	switch {
	case !f.Persistent:
		return rdma.NoFlush
	case !f.Adapter:
		return rdma.Processor
	case f.Pages, f.Processors && !f.Caches:
		return rdma.Message
	case f.NotNative == nil:
		return rdma.Native
	case f.Caches, f.DDIO == DDIOOff:
		return rdma.ReadAfterWrite
	}
	return rdma.Message
}
