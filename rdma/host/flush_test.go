package host

import (
	"errors"
	"testing"

	"github.com/quarrystore/quarry/rdma"
	"github.com/stretchr/testify/require"
)

// What a node chooses, and what it refuses to be told. auto takes a method only where it is proven: unknown DDIO is agent.
func TestChooseFlush(t *testing.T) {
	none := errors.New("no FLUSH of its own")
	memory := FlushFacts{NotNative: none}
	cpu := FlushFacts{Persistent: true, NotNative: none}
	unknown := FlushFacts{Persistent: true, Adapter: true, NotNative: none}
	on, off, caches, native := unknown, unknown, unknown, unknown
	on.DDIO, off.DDIO, caches.Caches, caches.DDIO, native.NotNative = DDIOOn, DDIOOff, true, DDIOOn, nil
	chains, inCaches := native, native
	chains.DDIO, chains.Processors = DDIOOff, true
	inCaches.Processors, inCaches.Caches = true, true
	pages := native
	pages.DDIO, pages.Pages = DDIOOff, true
	for _, c := range []struct {
		name   string
		facts  FlushFacts
		want   string
		method rdma.FlushMethod
		says   string
	}{
		{"memory", memory, "auto", rdma.NoFlush, ""},
		{"memory", memory, "agent", 0, "does not survive"},
		{"processors", cpu, "", rdma.Processor, ""},
		{"processors", cpu, "native", 0, "serves no RDMA"},
		{"DDIO unknown", unknown, "auto", rdma.Message, ""},
		{"DDIO unknown", unknown, "appliance", rdma.ReadAfterWrite, ""},
		{"DDIO unknown", unknown, "native", 0, "no FLUSH of its own"},
		{"DDIO on", on, "auto", rdma.Message, ""},
		{"DDIO on", on, "appliance", 0, "DDIO"},
		{"DDIO off", off, "auto", rdma.ReadAfterWrite, ""},
		{"DDIO off", off, "agent", rdma.Message, ""},
		{"eADR", caches, "auto", rdma.ReadAfterWrite, ""},
		{"eADR", caches, "appliance", rdma.ReadAfterWrite, ""},
		{"native", native, "auto", rdma.Native, ""},
		{"native", native, "native", rdma.Native, ""},
		{"native", native, "agent", rdma.Message, ""},
		{"chains by processors", chains, "auto", rdma.Message, ""},
		{"chains by processors", chains, "agent", rdma.Message, ""},
		{"chains by processors", chains, "native", 0, "stays in their caches"},
		{"chains by processors", chains, "appliance", 0, "stays in their caches"},
		{"chains by processors, eADR", inCaches, "auto", rdma.Native, ""},
		{"chains by processors, eADR", inCaches, "appliance", rdma.ReadAfterWrite, ""},
		{"msync", pages, "auto", rdma.Message, ""},
		{"msync", pages, "agent", rdma.Message, ""},
		{"msync", pages, "appliance", 0, "pages"},
		{"msync", pages, "native", 0, "pages"},
		{"native", native, "sometimes", 0, "want auto, native, appliance or agent"},
	} {
		m, err := ChooseFlush(c.want, c.facts)
		require.Equal(t, c.method, m, "%s, %s", c.name, c.want)
		if c.says == "" {
			require.NoError(t, err, "%s, %s", c.name, c.want)
			continue
		}
		require.ErrorContains(t, err, c.says, "%s, %s", c.name, c.want)
		require.ErrorContains(t, err, "--flush "+c.want)
	}
}
