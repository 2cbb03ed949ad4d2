package storagenode

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/internal/userdir"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/storagenode/state"
)

// controllers calls whichever controller leads.
type controllers struct {
	urls  []string // as configured
	http  *http.Client
	token string // shown to controllers; "": none

	mu     sync.Mutex                       // guards the fields below
	others []string                         // of hosts where controllers take part in the pulse, as the leader has said
	next   int                              // of urls
	hint   string                           // the leader as a standby named it; not always one of urls
	last   string                           // the URL of client
	client quarrypbconnect.ControllerClient // of last
}

func newControllers(cfg Config) *controllers {
	c := &controllers{token: cfg.Token, http: &http.Client{Transport: cfg.Wire.Transport(userdir.Transport(&http.Transport{TLSClientConfig: cfg.ControllerTLS, IdleConnTimeout: time.Minute}))}}
	for _, u := range cfg.Controllers {
		c.urls = append(c.urls, strings.TrimRight(u, "/"))
	}
	return c
}

// meet notes where controllers take part in the pulse: a leader there is followed, too.
func (c *controllers) meet(pulse []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.others = c.others[:0]
	for _, address := range pulse {
		c.others = append(c.others, "http://"+address)
	}
}

func (c *controllers) close() { c.http.CloseIdleConnections() }

// call asks one controller; after a failure the next call asks the leader that was
// named, or the next in turn.
func (c *controllers) call(ctx context.Context, f func(context.Context, quarrypbconnect.ControllerClient) error) error {
	c.mu.Lock()
	url := c.hint
	if url == "" {
		url = c.urls[c.next]
	}
	if c.last != url { // making a client costs more than a heartbeat with it
		c.last, c.client = url, quarrypbconnect.NewControllerClient(c.http, url, connect.WithReadMaxBytes(maxAnswerBytes), connect.WithInterceptors(agentauth.Token(c.token)))
	}
	client := c.client
	c.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	err := f(ctx, client)
	if err == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var leader string
	var ce *connect.Error
	if errors.As(err, &ce) {
		leader = quarrypb.LeaderFrom(url, ce.Meta().Get(quarrypb.LeaderHeader), append(c.others, c.urls...))
	}
	switch {
	case leader != "" && leader != url:
		c.hint = leader
	case url == c.hint:
		c.hint = "" // it does not lead any more
	default:
		c.next = (c.next + 1) % len(c.urls)
	}
	return fmt.Errorf("controller %s: %w", url, err)
}

// final says whether an error stays if the call is repeated.
func final(err error) bool {
	var se *state.Error
	if errors.As(err, &se) {
		return se.Code != state.Stale && se.Code != state.Busy
	}
	switch connect.CodeOf(err) {
	case connect.CodeInvalidArgument, connect.CodeFailedPrecondition, connect.CodeUnauthenticated, connect.CodePermissionDenied, connect.CodeAlreadyExists, connect.CodeResourceExhausted:
		return true
	}
	return false
}

// register registers the node, and tries again until a controller has accepted it.
func (n *Node) register(ctx context.Context) error {
	var last error
	for tries := 0; ; tries++ {
		err := n.registerOnce(ctx)
		if err == nil {
			return nil
		}
		if final(err) {
			return fmt.Errorf("storage node %s: registration: %w", n.cfg.Name, err)
		}
		if ctx.Err() == nil {
			last = err
		}
		if tries == 10 {
			n.cfg.Logger.Warn("storage node: not registered yet", "node", n.cfg.Name, "error", err)
		}
		select {
		case <-time.After(retryEvery):
		case <-ctx.Done():
			return fmt.Errorf("storage node %s: registration: %w", n.cfg.Name, errors.Join(ctx.Err(), last))
		case <-n.ctx.Done():
			return n.ctx.Err()
		}
	}
}

// registerOnce registers the node with one controller, takes what the answer says, and starts to
// serve.
func (n *Node) registerOnce(ctx context.Context) error {
	req := &quarrypb.RegisterNodeRequest{Node: n.self(), Found: n.hosted(), Token: n.cfg.Token, Secret: n.secret[:]}
	n.mu.Lock()
	if c := n.state.Cluster; c != [16]byte{} {
		req.Cluster = c[:]
	}
	n.mu.Unlock()
	var res *quarrypb.RegisterNodeResponse
	err := n.controllers.call(ctx, func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
		r, err := cl.RegisterNode(ctx, connect.NewRequest(req))
		if err == nil {
			res = r.Msg
		}
		return err
	})
	if err != nil {
		return err
	}
	if len(res.Cluster) != 16 || len(res.Keys) == 0 || res.Id == 0 {
		return errors.New("the controller's answer names no cluster, public key or number: is it of an earlier version?")
	}
	if err := n.learnKeys(res.Keys); err != nil {
		return err
	}
	n.mu.Lock()
	n.beatMs, n.pulseKey = res.HeartbeatMs, res.PulseKey
	if !n.served { // not serving yet: an earlier answer may have been another cluster's
		if n.access != nil {
			err = n.access.Close(ctx)
		}
		if err == nil {
			n.access, err = n.admit([16]byte(res.Cluster), res.Id)
		}
	}
	n.mu.Unlock()
	if err != nil {
		return err
	}
	err = n.do(ctx, state.Registered{Term: res.ControllerTerm, Cluster: [16]byte(res.Cluster), Node: res.Id,
		Next: res.NextSerial, Live: res.LiveSerials, Fenced: res.FencedSerials})
	if err == nil {
		n.counts.registrations.Add(1)
		n.learnSeeds(res.Pulse)
		n.settle()
		n.serve()
	}
	return err
}

// settle has the keeper note which regions are here, before the node takes commands that change it.
func (n *Node) settle() {
	n.mu.Lock()
	here, served := slices.Clone(n.state.Regions), n.served
	n.mu.Unlock()
	if n.keeper == nil || served {
		return
	}
	if err := n.keeper.settle(here); err != nil {
		n.cfg.Logger.Warn("storage node: which regions are here is not kept: those that go missing will not be noticed", "node", n.cfg.Name, "error", err)
	}
}

// learnKeys replaces the public keys of the controllers.
func (n *Node) learnKeys(keys [][]byte) error {
	if len(keys) > keyring.MaxKeys {
		return fmt.Errorf("the controller names %d public keys: want at most %d", len(keys), keyring.MaxKeys)
	}
	var ring []keyring.Public
	for _, k := range keys {
		if len(k) != len(keyring.Public{}) {
			return fmt.Errorf("the controller names a public key of %d bytes", len(k))
		}
		ring = append(ring, keyring.Public(k))
	}
	n.keys.Set(ring...)
	return nil
}

// beat sends heartbeats, and registers again when a controller asks for it.
func (n *Node) beat() {
	unsaved := false // a registration: it is tried again
	for {
		n.mu.Lock()
		every := time.Duration(n.beatMs) * time.Millisecond
		n.mu.Unlock()
		again := false
		select {
		case <-n.ctx.Done():
			return
		case <-n.renew:
			again = true
		case <-n.left.some:
			// Connections of one process end together, and with them those of a host.
			select {
			case <-n.ctx.Done():
				return
			case <-time.After(leftPause):
			}
		case <-n.pulse.hurry:
		case <-time.After(n.beatEvery(max(every/2, 10*time.Millisecond))):
		}
		n.saveAgain()
		n.noteFailure()
		if !again {
			again = n.heartbeat()
		}
		if again || unsaved {
			err := n.register(n.ctx)
			if unsaved = errors.Is(err, errUnsaved); err != nil && !unsaved && n.ctx.Err() == nil {
				n.cfg.Logger.Error("storage node: not registered any more", "error", err)
				n.failed <- err
				return
			}
		}
	}
}

// heartbeat sends one heartbeat. It says whether the controller asks the node to register again.
// Without an answer nothing changes: the data path needs no controller.
func (n *Node) heartbeat() (unknown bool) {
	n.mu.Lock()
	req := &quarrypb.NodeHeartbeatRequest{Id: n.state.Node, Incarnation: n.incarnation, HostedBytes: n.state.HostedSize, AvailableBytes: n.medium.left(), Secret: n.secret[:]}
	for _, k := range n.keys.Keys() {
		req.KeyIds = append(req.KeyIds, k.ID())
	}
	n.mu.Unlock()
	req.ResidentBytes, req.Connected, req.UsedBytes = n.resident(), n.connected(), n.usedBytes()
	req.EndedSessions, req.Stopping = n.whoLeft(), n.ending.stopping.Load()
	// The timeout of one call leaves time for the other controllers where one accepts and never answers.
	ctx, cancel := context.WithTimeout(n.ctx, beatTimeout)
	defer cancel()
	n.pulse.calm = 0
	err := n.controllers.call(ctx, func(ctx context.Context, cl quarrypbconnect.ControllerClient) error {
		r, err := cl.NodeHeartbeat(ctx, connect.NewRequest(req))
		if err == nil {
			unknown = r.Msg.Unknown
			n.ending.told(r.Msg)
			n.pulse.calm = time.Duration(r.Msg.CalmMs) * time.Millisecond
			n.learnSeeds(r.Msg.Pulse)
			if len(r.Msg.Keys) > 0 {
				return n.learnKeys(r.Msg.Keys)
			}
		}
		return err
	})
	if n.ctx.Err() != nil {
		return false
	}
	if lost := err != nil; lost != n.lost {
		n.lost = lost
		n.counts.cut.Store(lost)
		if lost {
			n.cfg.Logger.Warn("storage node: no controller answers; serving goes on", "node", n.cfg.Name, "error", err)
		} else {
			n.cfg.Logger.Info("storage node: a controller answers again", "node", n.cfg.Name)
		}
	}
	n.noteHealth()
	if err != nil || unknown {
		n.left.giveBack(req.EndedSessions)
	}
	return err == nil && unknown
}
