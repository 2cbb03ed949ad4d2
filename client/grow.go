package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/alloc"
	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

// refusalTime is how long all lanes of a session take one refusal of a region for an answer.
// Otherwise many callers that find the cluster full would keep the controller from renewing
// leases.
const refusalTime = 300 * time.Millisecond

// regionRefusal is why a controller has made no region.
type regionRefusal struct {
	err   error
	until int64 // clock.Now time; then the controller is asked again
}

// Grow asks a controller for another region; see alloc.Source.
func (l *lane) Grow(h alloc.Home, newest uint32) error {
	known := l.session.refusals.of(h)
	if r := known.Load(); r != nil && clock.Now() < r.until {
		return r.err
	}
	if l.park() {
		defer l.unpark()
	}
	ctx, cancel := l.withTimeout()
	defer cancel()
	req := &quarrypb.CreateRegionRequest{Replicas: uint32(h.Replicas), Durability: quarrypb.Durability_DURABILITY_MEM, UnlessNewerThan: &newest}
	if h.Durable {
		req.Durability = quarrypb.Durability_DURABILITY_PMEM
	}
	if err := l.createRegion(ctx, req); err != nil {
		err = growError(err)
		if !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) { // else it concerns this caller alone
			known.Store(&regionRefusal{err, clock.In(refusalTime)})
		}
		return err
	}
	_ = l.session.refresh(l.ctx)
	return nil
}

// busyPause is between two requests for a region that the controller did not make because
// something that it needs was changing.
const busyPause = 50 * time.Millisecond

// createRegion asks for a region, and asks again while the controller answers that it is to
// be tried again: such as when a storage node has restarted while the region was made.
func (l *lane) createRegion(ctx context.Context, req *quarrypb.CreateRegionRequest) error {
	for {
		_, err := request(l.session.client.control, ctx, req, quarrypbconnect.ControllerClient.CreateRegion)
		if connect.CodeOf(err) != connect.CodeAborted {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(busyPause):
		}
	}
}

// growError is the error of an Alloc for which no region was made: ErrNoSpace if the
// controller has refused for want of memory or nodes. An unknown outcome of the request is
// none of the Alloc, which has made no object.
func growError(err error) error {
	var ce *connect.Error
	switch {
	case errors.Is(err, ErrUnknown):
		return fmt.Errorf("%w: %v", ErrUnreachable, err)
	case errors.As(err, &ce) && (ce.Code() == connect.CodeResourceExhausted || ce.Code() == connect.CodeFailedPrecondition):
		return fmt.Errorf("%w: %w", ErrNoSpace, &controllerMessage{ce})
	}
	return err
}
