package host

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
)

// Loop is the Relay through a provider of the node's own, by which the node dials itself.
type Loop struct {
	// Dialer and Addr reach the provider. The caller closes the dialer after the Access.
	Dialer rdma.Dialer
	Addr   string
	// Cluster is the node's; Key signs the loop's tickets, and is known to the provider alone.
	Cluster [16]byte
	Key     *keyring.Signer
	// Ended returns when nothing of a loop lane runs at the provider any more.
	Ended func(lane uint32)

	lanes atomic.Uint32
}

// chainPatience bounds the wait for one chain to the own adapter.
const chainPatience = 10 * time.Second

// Lane connects the way of one lane.
func (l *Loop) Lane(ctx context.Context, t *rdma.Ticket) (RelayLane, error) {
	own := rdma.Issue(l.Key, rdma.Ticket{Cluster: l.Cluster, Serial: LoopSerial, Rights: t.Rights, Tenant: t.Tenant})
	number := l.lanes.Add(1)
	c, err := l.Dialer.Dial(ctx, l.Addr, own, number)
	if err != nil {
		return nil, err
	}
	return &loopLane{loop: l, number: number, conn: c, targets: make(map[uint32]*rdma.Target)}, nil
}

// loopLane is one connection of a Loop. The lane that the relay serves owns it.
type loopLane struct {
	loop    *Loop                   // the relay that made it
	number  uint32                  // of the loop session's lane at the provider
	conn    rdma.Conn               // to the provider; used by the one goroutine that runs the tcp lane's chains
	broken  bool                    // conn has no outcome for a chain and needs a Reset before the next one
	targets map[uint32]*rdma.Target // by region
}

// Open opens a region on the adapter for the relayed lane.
func (l *loopLane) Open(ctx context.Context, region uint32, epoch uint64) (*rdma.Target, error) {
	if err := l.reconnect(ctx); err != nil {
		return nil, err
	}
	w, err := l.conn.Open(ctx, region, epoch)
	if err != nil {
		l.broken = errors.Is(err, rdma.ErrBroken)
		return nil, err
	}
	to := &rdma.Target{Conn: l.conn, Window: w}
	l.targets[region] = to
	return to, nil
}

// reconnect connects again after a failure; nothing of the old connection runs.
func (l *loopLane) reconnect(ctx context.Context) error {
	if !l.broken {
		return nil
	}
	if err := l.conn.Reset(ctx); err != nil {
		return fmt.Errorf("%w: way through the adapter: %w", rdma.ErrBroken, err)
	}
	l.broken = false
	return nil
}

// Do runs a chain on the adapter. After a broken chain it makes the connection again first.
func (l *loopLane) Do(c *rdma.Chain) {
	if l.broken {
		ctx, cancel := context.WithTimeout(context.Background(), chainPatience)
		c.Err = l.reconnect(ctx)
		cancel()
		if c.Done = 0; c.Err != nil {
			return
		}
	}
	l.conn.Post(c)
	l.conn.Wait(c, clock.In(chainPatience))
	if errors.Is(c.Err, rdma.ErrBroken) {
		l.broken = true
		l.loop.Ended(l.number)
	}
}

// Close ends the connection. Its verbs have ended then.
func (l *loopLane) Close() error { return l.conn.Close() }
