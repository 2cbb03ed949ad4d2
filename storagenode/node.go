package storagenode

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	"github.com/quarrystore/quarry/internal/agentauth"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/storagenode/state"
)

// Node is a running storage node.
type Node struct {
	cfg         Config
	folder      *folder
	incarnation uint64
	hostID      string
	found       []*quarrypb.HostedRegion

	tcpListener net.Listener
	shmListener *net.UnixListener
	agent       *http.Server
	agentURL    string
	controllers *controllers
	ctx         context.Context
	cancel      context.CancelFunc
	wg          sync.WaitGroup
	failed      chan error
	renew       chan struct{}

	mu       sync.Mutex // one step of the machine, and what it reads, at a time
	state    *state.State
	memories map[uint32]*host.Memory
	access   *host.Access // nil until registered
	key      []byte       // the cluster's ticket key
	beatMs   uint32
	tcp      *tcp.Server
	shm      *shm.Server
}

// Start hosts what a node has, registers it and returns when a controller knows it.
func Start(ctx context.Context, cfg Config) (_ *Node, err error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	n := &Node{cfg: cfg, memories: map[uint32]*host.Memory{}, failed: make(chan error, 4), renew: make(chan struct{}, 1)}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			n.Close()
		}
	}()
	var b [8]byte
	rand.Read(b[:])
	n.incarnation = binary.LittleEndian.Uint64(b[:]) | 1
	if id, err := os.ReadFile("/proc/sys/kernel/random/boot_id"); err == nil {
		n.hostID = strings.TrimSpace(string(id))
	}
	if err := n.recall(); err != nil {
		return nil, err
	}
	if err := n.listen(ctx); err != nil {
		return nil, err
	}
	n.controllers = newControllers(cfg)
	if err := n.register(ctx); err != nil {
		return nil, err
	}
	n.wg.Go(n.beat)
	return n, nil
}

// recall reads the node's folder.
func (n *Node) recall() error {
	limits := state.Limits{CapacityBytes: n.cfg.CapacityBytes}
	var kept state.Kept
	var regions []state.Region
	if n.cfg.Dir != "" {
		d, err := openFolder(n.cfg.Dir)
		if err != nil {
			return err
		}
		n.folder = d
		if kept, err = d.load(); err != nil {
			return err
		}
		list, err := d.scan(kept)
		if err != nil {
			return err
		}
		for _, f := range list {
			n.memories[f.region.Number] = f.memory
			regions = append(regions, f.region)
			n.found = append(n.found, &quarrypb.HostedRegion{Region: f.region.Number, Uuid: f.region.UUID[:], Cluster: f.region.Cluster[:], SizeBytes: f.region.Bytes, Epoch: f.region.Epoch})
			kept.Cluster = f.region.Cluster
		}
		limits.Persistent = persistent(n.cfg.Dir)
	}
	n.state = state.New(limits, kept, regions)
	return nil
}

// listen opens all ports. The fabric's connections wait in the backlog until the
// node is registered and can tell good tickets from bad.
func (n *Node) listen(ctx context.Context) (err error) {
	var lc net.ListenConfig
	if n.tcpListener, err = lc.Listen(ctx, "tcp", n.cfg.Listen); err != nil {
		return fmt.Errorf("storage node %s: fabric: %w", n.cfg.Name, err)
	}
	if n.cfg.Socket != noSocket {
		if n.shmListener, err = shm.Listen(n.cfg.Socket); err != nil {
			return fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
		}
	}
	l, err := lc.Listen(ctx, "tcp", n.cfg.AgentListen)
	if err != nil {
		return fmt.Errorf("storage node %s: agent: %w", n.cfg.Name, err)
	}
	n.agentURL = "http://" + l.Addr().String()
	if n.cfg.TLS != nil {
		n.agentURL = "https://" + l.Addr().String()
		l = tls.NewListener(l, n.cfg.TLS)
	}
	mux := http.NewServeMux()
	mux.Handle(quarrypbconnect.NewAgentHandler(&agent{n}, connect.WithReadMaxBytes(8<<20), connect.WithInterceptors(agentauth.Server(n.ticketKey))))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	n.agent = &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute}
	n.wg.Go(func() {
		if err := n.agent.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			n.failed <- fmt.Errorf("storage node %s: agent: %w", n.cfg.Name, err)
		}
	})
	return nil
}

func (n *Node) ticketKey() []byte {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.key
}

// serve starts the fabric once the cluster is known. Called with mu held.
func (n *Node) serve(cluster [16]byte, key [32]byte, id uint32) {
	if n.access != nil {
		return
	}
	n.access = host.New(cluster, key, id, n.incarnation, host.Limits{})
	n.key = key[:]
	n.tcp = tcp.NewServer(n.access, n.cfg.Logger)
	n.wg.Go(func() {
		if err := n.tcp.Serve(n.tcpListener); err != nil {
			n.failed <- fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
		}
	})
	if n.shmListener != nil {
		n.shm = shm.NewServer(n.access, n.cfg.Logger)
		n.wg.Go(func() {
			if err := n.shm.Serve(n.shmListener); err != nil && n.ctx.Err() == nil {
				n.failed <- fmt.Errorf("storage node %s: %w", n.cfg.Name, err)
			}
		})
	}
}

// Err yields what has stopped a port from serving.
func (n *Node) Err() <-chan error { return n.failed }

// Stats describes a node.
type Stats struct {
	Name          string               `json:"name"`
	ID            uint32               `json:"id"`
	Incarnation   uint64               `json:"incarnation"`
	TCP           string               `json:"tcp"`
	Socket        string               `json:"socket,omitempty"`
	Agent         string               `json:"agent"`
	HostedBytes   uint64               `json:"hosted_bytes"`
	ResidentBytes uint64               `json:"resident_bytes"`
	Regions       []host.RegionStatus  `json:"regions"`
	Sessions      []host.SessionStatus `json:"sessions"`
	Counters      host.Counters        `json:"counters"`
}

// Stats is a snapshot.
func (n *Node) Stats() Stats {
	s := Stats{Name: n.cfg.Name, Incarnation: n.incarnation, TCP: n.tcpListener.Addr().String(), Agent: n.agentURL, ResidentBytes: n.resident()}
	if n.shmListener != nil {
		s.Socket = n.cfg.Socket
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	s.ID, s.HostedBytes = n.state.Node, n.state.HostedSize
	if n.access != nil {
		s.Regions, s.Sessions, s.Counters = n.access.Regions(), n.access.Sessions(), n.access.Counters()
	}
	return s
}

// self is the node as the table shows it.
func (n *Node) self() *quarrypb.Node {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := &quarrypb.Node{
		Name: n.cfg.Name, FailureDomain: n.cfg.FailureDomain, Incarnation: n.incarnation, AgentUrl: n.agentURL,
		CapacityBytes: n.cfg.CapacityBytes, Persistent: n.state.Limits.Persistent, Domain: uint32(proto.DomainCPU), Id: n.state.Node,
		Endpoints: []*quarrypb.Endpoint{{Provider: quarrypb.Provider_PROVIDER_TCP, Address: n.tcpListener.Addr().String()}},
	}
	if n.shmListener != nil {
		p.Endpoints = append(p.Endpoints, &quarrypb.Endpoint{Provider: quarrypb.Provider_PROVIDER_SHM, Address: n.cfg.Socket, HostId: n.hostID})
	}
	return p
}

// Close stops serving and returns when no verb runs any more.
func (n *Node) Close() error {
	n.cancel()
	var errs []error
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if n.agent != nil {
		if err := n.agent.Shutdown(ctx); err != nil {
			errs = append(errs, n.agent.Close())
		}
	}
	n.mu.Lock()
	access, tcpServer, shmServer := n.access, n.tcp, n.shm
	n.mu.Unlock()
	if n.tcpListener != nil {
		n.tcpListener.Close()
	}
	if tcpServer != nil {
		tcpServer.Close()
	}
	if shmServer != nil {
		errs = append(errs, shmServer.Close())
	} else if n.shmListener != nil {
		n.shmListener.Close()
	}
	if access != nil {
		errs = append(errs, access.Close(ctx))
	}
	n.wg.Wait()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, m := range n.memories {
		errs = append(errs, m.Close())
	}
	n.memories = nil
	n.folder.close()
	if n.controllers != nil {
		n.controllers.close()
	}
	return errors.Join(errs...)
}
