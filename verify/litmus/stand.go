package litmus

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/verbs"
)

// regionBytes is the memory that the programs work on.
const regionBytes = proto.MinRegionBytes

// Stand is a node and a dialer that reaches it, in one process.
type Stand struct {
	Dialer rdma.Dialer
	Addr   string
	// Memory is region 1, open under epoch 1, as processors see it.
	Memory *host.Memory
	// Cluster and Key sign tickets.
	Cluster [16]byte
	Key     *keyring.Signer
	Fence   func(ctx context.Context, serials ...uint64) error
	// Rotated is region 2, as processors see it. Rotate closes it, opens it under a later
	// epoch and returns that epoch; the first call only opens it.
	Rotated *host.Memory
	Rotate  func(ctx context.Context) (epoch uint64, err error)
	// Register registers memory with the dialer; may be nil.
	Register func(mem []byte) error
	// Flushed counts native FLUSHes; may be nil.
	Flushed func() uint64

	serials atomic.Uint64
}

// OnDevice makes a stand on an RDMA device. close releases everything.
func OnDevice(ctx context.Context, c verbs.Config) (s *Stand, caps verbs.Caps, close func() error, err error) {
	s = &Stand{}
	rand.Read(s.Cluster[:])
	var seed [keyring.SeedBytes]byte
	rand.Read(seed[:])
	s.Key = keyring.NewSigner(seed)
	server, err := verbs.NewServer(s.Cluster, keyring.NewRing(s.Key.Public()), 1, 1, host.Limits{}, c, slog.Default())
	if err != nil {
		return nil, caps, nil, err
	}
	var undo []func() error
	close = func() error {
		var errs []error
		for i := len(undo) - 1; i >= 0; i-- {
			errs = append(errs, undo[i]())
		}
		return errors.Join(errs...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, close())
		}
	}()
	for _, m := range []**host.Memory{&s.Memory, &s.Rotated} {
		if *m, err = host.NewMemory("litmus", regionBytes); err != nil {
			return nil, caps, nil, errors.Join(err, server.Close(context.Background()))
		}
		undo = append(undo, (*m).Close)
	}
	undo = append(undo, func() error { return server.Close(context.Background()) })
	caps = server.Caps()
	s.Rotate = rotation(s.Rotated, server)
	if err := server.OpenRegion(ctx, 1, 1, s.Memory); err != nil {
		return nil, caps, nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, caps, nil, err
	}
	go server.Serve(l) //nolint:errcheck // ends with Close
	c.Device, c.Port, c.GID = caps.Device, caps.Port, caps.GID
	d, err := verbs.NewDialer(c)
	if err != nil {
		return nil, caps, nil, err
	}
	undo = append(undo, d.Close)
	s.Dialer, s.Addr, s.Fence, s.Register = d, l.Addr().String(), server.Fence, d.Register
	s.Flushed = func() uint64 { return d.Stats().Flushed }
	return s, caps, close, nil
}

// rotation returns the Rotate function of a node.
func rotation(m *host.Memory, node interface {
	OpenRegion(ctx context.Context, region uint32, epoch uint64, m *host.Memory) error
	CloseRegion(ctx context.Context, region uint32, epoch uint64) error
}) func(ctx context.Context) (uint64, error) {
	epoch := uint64(0)
	return func(ctx context.Context) (uint64, error) {
		epoch++
		return epoch, errors.Join(node.CloseRegion(ctx, 2, epoch-1), node.OpenRegion(ctx, 2, epoch, m))
	}
}

// lane is one queue pair, in a session of its own.
type lane struct {
	to     rdma.Target
	serial uint64
	round  rdma.Round
	arena  *rdma.Arena
}

const laneBytes = 2 << 20

// lane connects one.
func (s *Stand) lane(ctx context.Context) (*lane, error) {
	l := &lane{serial: s.serials.Add(1)}
	t := rdma.Issue(s.Key, rdma.Ticket{Cluster: s.Cluster, Session: uint32(l.serial), Serial: l.serial, Rights: rdma.ReadWrite})
	c, err := s.Dialer.Dial(ctx, s.Addr, t, 0)
	if err != nil {
		return nil, err
	}
	if l.to.Conn = c; s.Register != nil {
		if l.arena, err = rdma.NewArena(laneBytes); err == nil {
			err = s.Register(l.arena.Bytes())
		}
	}
	if err == nil {
		l.to.Window, err = c.Open(ctx, 1, 1)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return l, nil
}

// lanes connects several; close ends them.
func (s *Stand) lanes(ctx context.Context, n int) (all []*lane, close func(), err error) {
	close = func() {
		for _, l := range all {
			l.to.Conn.Close()
		}
	}
	for range n {
		l, err := s.lane(ctx)
		if err != nil {
			close()
			return nil, nil, err
		}
		all = append(all, l)
	}
	return all, close, nil
}

// buffer returns memory that the device can reach.
func (l *lane) buffer(n int) []byte {
	if l.arena != nil {
		if b, err := l.arena.Alloc(n); err == nil {
			return b
		}
	}
	return make([]byte, n) // copied by the lane
}

// patience bounds the wait for one chain.
const patience = 20 * time.Second

// do runs one chain.
func (l *lane) do(build func(c *rdma.Chain)) (*rdma.Chain, error) {
	l.round.Reset()
	l.round.Deadline = clock.In(patience)
	build(l.round.Chain(&l.to))
	rdma.Do(&l.round)
	c := l.round.At(0)
	if c.Err != nil {
		return c, fmt.Errorf("chain of %d verbs, %d done: %w", len(c.Verbs), c.Done, c.Err)
	}
	return c, nil
}
