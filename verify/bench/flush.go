package bench

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/rdma/verbs"
)

// FlushConfig is what Flush measures. Each is needed.
type FlushConfig struct {
	// Data is where the memory of the node lies: a folder, or a device DAX, of which bytes from the middle on are written to.
	Data   string
	Device verbs.Config  // the RDMA device
	Bytes  int           // of a WRITE; a multiple of 8, at least 8
	Each   time.Duration // of one row
}

// FlushRow is what a flush method costs over one provider, or why it was not measured. Times are medians of a round, the three in
// turns.
type FlushRow struct {
	Provider string  `json:"provider"`
	Method   string  `json:"method"`           // an rdma.FlushMethod
	Memory   string  `json:"memory,omitempty"` // and how it is flushed
	Rounds   int     `json:"rounds,omitempty"`
	EmptyNS  int64   `json:"empty_ns,omitempty"`   // a READ of 8 bytes
	WriteNS  int64   `json:"write_ns,omitempty"`   // a WRITE
	FlushNS  int64   `json:"flushed_ns,omitempty"` // a WRITE and its persistent FLUSH
	P99NS    int64   `json:"p99_ns,omitempty"`     // of the last
	Ratio    float64 `json:"ratio,omitempty"`      // of a flushed WRITE to an empty round
	Why      string  `json:"why,omitempty"`        // it was not measured
	Note     string  `json:"note,omitempty"`
}

const noteAppliance = "durable only where the adapter's WRITEs go past the processors' caches (DDIO off) or these survive"

// Flush measures every flush method that can run here, on nodes in this process, and says why another cannot.
func Flush(ctx context.Context, cfg FlushConfig, tell func(FlushRow)) error {
	if cfg.Bytes < 8 || cfg.Bytes%8 != 0 || cfg.Bytes > flushRegion/2 {
		return fmt.Errorf("WRITEs of %d bytes: want a multiple of 8 up to %d", cfg.Bytes, flushRegion/2)
	}
	var made []*host.Memory
	defer func() {
		for _, m := range made {
			m.Close()
		}
	}()
	kept, err := memoryAt(cfg.Data)
	if err != nil {
		return err
	}
	made = append(made, kept)
	memories := []flushed{{kept, describe(kept.Persistence())}}
	if k := kept.Persistence().Kind; k == pmem.KindFile || k == pmem.KindVolatile {
		// No persistent memory: the instructions that would flush it, on other memory.
		if f, ok := ofLines(); ok {
			m, err := host.NewFlushedMemory("bench", flushRegion, f)
			if err != nil {
				return err
			}
			made = append(made, m)
			memories = append(memories, flushed{m, f.Way().String() + " on memory that does not survive"})
		}
	}
	for _, m := range memories {
		for _, provider := range []string{"inproc", "shm", "tcp"} {
			row := FlushRow{Provider: provider, Method: rdma.Processor.String(), Memory: m.what}
			switch {
			case !m.memory.Persistent():
				row.Why = fmt.Sprintf("%s does not survive a loss of power: name a folder that does, or a device DAX", cfg.Data)
			case provider == "shm" && m.memory != kept:
				continue // a client decides for its own mapping, whose kernel knows that this memory does not survive
			case provider == "shm" && kept.Persistence().Kind == pmem.KindDevDAX:
				row.Why = "processes are sent no descriptor of a device, which would be one of all its regions"
			default:
				err = measureFlush(ctx, cfg, m.memory, onHost[provider], &row)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", provider, err)
			}
			tell(row)
		}
	}
	return flushOfAdapters(ctx, cfg, memories, tell)
}

// flushed is memory of a measurement.
type flushed struct {
	memory *host.Memory
	what   string
}

const flushRegion = proto.MinRegionBytes

func describe(p pmem.Persistence) string {
	if p.Domain != "" {
		return fmt.Sprintf("%s (%s), %s", p.Kind, p.Domain, p.Flush)
	}
	return p.Kind + ", " + p.Flush
}

// ofLines is the best way of this processor to write lines back.
func ofLines() (best pmem.Flusher, ok bool) {
	for _, f := range pmem.Flushers() {
		if f.Granularity() == "line" {
			best, ok = f, true
		}
	}
	return best, ok
}

// memoryAt makes the memory of a node in a folder, or on a device.
func memoryAt(path string) (*host.Memory, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if st.IsDir() {
		f, err := os.CreateTemp(path, "quarry-bench-")
		if err != nil {
			return nil, err
		}
		f.Close()
		defer os.Remove(f.Name()) // the memory has it open
		return host.OpenMemory(f.Name(), flushRegion, true)
	}
	dev, err := pmem.OpenDevice(path)
	if err != nil {
		return nil, err
	}
	defer dev.File.Close() // the memory has a descriptor of its own
	if dev.Bytes < 2*flushRegion {
		return nil, fmt.Errorf("%s has %d bytes: want %d", path, dev.Bytes, 2*flushRegion)
	}
	return host.OpenDeviceMemory(dev, "bench", (dev.Bytes/2)&^(2<<20-1), flushRegion, func([]byte) (uint64, error) { return flushRegion, nil })
}

// flushOfAdapters measures the methods of RDMA devices: each on memory that the device registers.
func flushOfAdapters(ctx context.Context, cfg FlushConfig, memories []flushed, tell func(FlushRow)) error {
	m := memories[0]
	if m.memory.Pin() != nil || !m.memory.Persistent() || m.memory.Persistence().Flush == pmem.Msync.String() {
		m = memories[len(memories)-1]
	}
	for _, method := range []rdma.FlushMethod{rdma.Native, rdma.ReadAfterWrite, rdma.Message} {
		row := FlushRow{Provider: "verbs", Method: method.String(), Memory: m.what}
		device := cfg.Device
		device.Flush = method
		err := m.memory.Pin()
		if err == nil && method == rdma.Native {
			device.Windows = verbs.WindowsOff // which have no FLUSH
			err = verbs.NotNative(device, m.memory.Bytes())
		}
		if method == rdma.ReadAfterWrite {
			row.Note = noteAppliance
		}
		if err == nil {
			err = measureFlush(ctx, cfg, m.memory, onDevice(device), &row)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil { // no device, no driver, not in this build
			row = FlushRow{Provider: row.Provider, Method: row.Method, Why: err.Error()}
		}
		tell(row)
	}
	return nil
}

// stand is a node and what reaches it.
type stand struct {
	dialer   rdma.Dialer
	addr     string
	register func([]byte) error // nil: buffers need not be registered
	close    func() error
}

// standing starts a node whose region 1 is the memory, open under epoch 1.
type standing func(ctx context.Context, cluster [16]byte, keys *keyring.Ring, m *host.Memory) (*stand, error)

// onHost are nodes whose verbs processors execute.
var onHost = map[string]standing{
	"inproc": func(ctx context.Context, cluster [16]byte, keys *keyring.Ring, m *host.Memory) (*stand, error) {
		return serving(ctx, cluster, keys, m, func(a *host.Access) (*stand, error) {
			d := shm.NewInproc()
			d.Add("bench", a)
			return &stand{dialer: d, addr: "bench", close: func() error { d.Remove("bench"); return nil }}, nil
		})
	},
	"shm": func(ctx context.Context, cluster [16]byte, keys *keyring.Ring, m *host.Memory) (*stand, error) {
		return serving(ctx, cluster, keys, m, func(a *host.Access) (*stand, error) {
			dir, err := os.MkdirTemp("", "quarry-bench-")
			if err != nil {
				return nil, err
			}
			addr := filepath.Join(dir, "s")
			l, err := shm.Listen(addr)
			if err != nil {
				return nil, errors.Join(err, os.RemoveAll(dir))
			}
			s := shm.NewServer(a, nil)
			go s.Serve(l) //nolint:errcheck // ends with Close
			return &stand{dialer: shm.NewDialer(), addr: addr, close: func() error { return errors.Join(s.Close(), os.RemoveAll(dir)) }}, nil
		})
	},
	"tcp": func(ctx context.Context, cluster [16]byte, keys *keyring.Ring, m *host.Memory) (*stand, error) {
		return serving(ctx, cluster, keys, m, func(a *host.Access) (*stand, error) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				return nil, err
			}
			s := tcp.NewServer(a, nil)
			go s.Serve(l) //nolint:errcheck // ends with Close
			return &stand{dialer: tcp.Dialer{}, addr: l.Addr().String(), close: func() error { s.Close(); return nil }}, nil
		})
	},
}

// serving makes a node of package host, and has start make it reachable.
func serving(ctx context.Context, cluster [16]byte, keys *keyring.Ring, m *host.Memory, start func(*host.Access) (*stand, error)) (*stand, error) {
	a := host.New(cluster, keys, 1, 1, host.Limits{})
	s, err := start(a)
	if err != nil {
		return nil, errors.Join(err, a.Close(ctx))
	}
	end := s.close
	s.close = func() error { return errors.Join(end(), a.Close(context.Background())) }
	if err := a.OpenRegion(ctx, 1, 1, m); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// onDevice is a node on an RDMA device.
func onDevice(c verbs.Config) standing {
	return func(ctx context.Context, cluster [16]byte, keys *keyring.Ring, m *host.Memory) (*stand, error) {
		server, err := verbs.NewServer(cluster, keys, 1, 1, host.Limits{}, c, slog.New(slog.DiscardHandler))
		if err != nil {
			return nil, err
		}
		undo := func() error { return server.Close(context.Background()) }
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err == nil {
			go server.Serve(l) //nolint:errcheck // ends with Close
			err = server.OpenRegion(ctx, 1, 1, m)
		}
		if err != nil {
			return nil, errors.Join(err, undo())
		}
		caps := server.Caps()
		c.Device, c.Port, c.GID = caps.Device, caps.Port, caps.GID
		d, err := verbs.NewDialer(c)
		if err != nil {
			return nil, errors.Join(err, undo())
		}
		return &stand{dialer: d, addr: l.Addr().String(), register: d.Register, close: func() error { return errors.Join(d.Close(), undo()) }}, nil
	}
}

// measureFlush fills in the times of a row.
func measureFlush(ctx context.Context, cfg FlushConfig, m *host.Memory, start standing, row *FlushRow) (err error) {
	var cluster [16]byte
	var seed [keyring.SeedBytes]byte
	rand.Read(cluster[:])
	rand.Read(seed[:])
	key := keyring.NewSigner(seed)
	s, err := start(ctx, cluster, keyring.NewRing(key.Public()), m)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	buffers, err := rdma.NewArena(2 << 20)
	if err != nil {
		return err
	}
	defer buffers.Close()
	if s.register != nil {
		if err := s.register(buffers.Bytes()); err != nil {
			return err
		}
	}
	c, err := s.dialer.Dial(ctx, s.addr, rdma.Issue(key, rdma.Ticket{Cluster: cluster, Session: 1, Serial: 1, Rights: rdma.ReadWrite}), 0)
	if err != nil {
		return err
	}
	defer c.Close()
	to := rdma.Target{Conn: c}
	if to.Window, err = c.Open(ctx, 1, 1); err != nil {
		return err
	}
	src, err := buffers.Alloc(cfg.Bytes)
	if err != nil {
		return err
	}
	word, err := buffers.Alloc(8)
	if err != nil {
		return err
	}
	// Addresses go through half of the region, so that no line is written while it is being flushed.
	at := func(i int) uint64 { return uint64(i*max(cfg.Bytes, 4096)) % (flushRegion / 2) &^ 63 }
	verbs := []func(c *rdma.Chain, i int){
		func(c *rdma.Chain, i int) { c.Read(at(i), word) },
		func(c *rdma.Chain, i int) { c.Write(at(i), src) },
		func(c *rdma.Chain, i int) {
			c.Write(at(i), src)
			c.Flush(rdma.Persistent, at(i), uint64(len(src)))
		},
	}
	took := [3][]int64{}
	var r rdma.Round
	for end := clock.Now() + int64(cfg.Each); row.Rounds == 0 || clock.Now() < end && row.Rounds < mostRounds; row.Rounds++ {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		for k, add := range verbs {
			src[0]++
			r.Reset()
			add(r.Chain(&to), row.Rounds)
			start := clock.Now()
			rdma.Do(&r)
			took[k] = append(took[k], clock.Now()-start)
			if err := r.At(0).Err; err != nil {
				return err
			}
		}
	}
	for k := range took {
		slices.Sort(took[k])
	}
	middle := func(k int) int64 { return took[k][len(took[k])/2] }
	row.EmptyNS, row.WriteNS, row.FlushNS, row.P99NS = middle(0), middle(1), middle(2), took[2][len(took[2])*99/100]
	row.Ratio = float64(row.FlushNS) / float64(max(1, row.EmptyNS))
	return nil
}

// mostRounds bounds the memory of a measurement.
const mostRounds = 1 << 20
