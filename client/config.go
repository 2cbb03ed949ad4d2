package client

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// DefaultTimeout bounds a call whose context has no deadline.
const DefaultTimeout = 10 * time.Second

// Transports.
const (
	TransportAuto  = "auto" // verbs where both sides have it, else shm on one host, else tcp
	TransportVerbs = "verbs"
	TransportSHM   = "shm"
	TransportTCP   = "tcp"
)

// Config of a Client. Only Controllers is needed.
type Config struct {
	// Controllers are the base URLs of one or more controllers, http or https.
	Controllers []string
	// Name shows up in lists of sessions; default program, host and process id.
	Name string
	// Transport is TransportAuto (default) or one of the others. What auto
	// has chosen is logged once for each node and told by Stats.
	Transport string
	// RequireRDMA refuses nodes that cannot be reached through an RDMA adapter.
	RequireRDMA bool
	// RDMADevice is DEVICE[/PORT][@ADDRESS], such as mlx5_0/1; "" is the best there is.
	RDMADevice string
	// Token is the cluster's token, where it asks for one.
	Token string
	// TLS for https controllers; nil means the system's defaults.
	TLS *tls.Config
	// Lanes is the number of calls that run at the same time, 1 to 256; further
	// ones wait. 0 means four for each CPU.
	Lanes int
	// ReadOnly opens a session that cannot change memory.
	ReadOnly bool
	// Replicas of the regions that Alloc uses, 1 to 5; 0 means 1.
	Replicas int
	// Logger; nil means slog.Default. Nothing is logged on the data path.
	Logger *slog.Logger
}

const maxLanes = 256

func (c Config) withDefaults() Config {
	if c.Name == "" {
		host, _ := os.Hostname()
		c.Name = fmt.Sprintf("%s@%s:%d", filepath.Base(os.Args[0]), host, os.Getpid())
	}
	if c.Transport == "" {
		c.Transport = TransportAuto
	}
	if c.Lanes == 0 {
		c.Lanes = min(maxLanes, 4*runtime.GOMAXPROCS(0))
	}
	if c.Replicas == 0 {
		c.Replicas = 1
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func (c Config) validate() error {
	if len(c.Controllers) == 0 {
		return errors.New("client: no controller given: set Config.Controllers, such as http://127.0.0.1:7420")
	}
	for _, u := range c.Controllers {
		p, err := url.Parse(u)
		if err != nil || p.Host == "" || p.Scheme != "http" && p.Scheme != "https" {
			return fmt.Errorf("client: controller %q: want a URL such as http://127.0.0.1:7420", u)
		}
	}
	switch {
	case c.Transport != TransportAuto && c.Transport != TransportVerbs && c.Transport != TransportSHM && c.Transport != TransportTCP:
		return fmt.Errorf("client: transport %q: want auto, verbs, shm or tcp", c.Transport)
	case c.RequireRDMA && c.Transport != TransportAuto && c.Transport != TransportVerbs:
		return fmt.Errorf("client: transport %s is not RDMA, which is required: use auto", c.Transport)
	case c.Lanes < 1 || c.Lanes > maxLanes:
		return fmt.Errorf("client: %d lanes: want 1 to %d", c.Lanes, maxLanes)
	case c.Replicas < 1 || c.Replicas > MaxReplicas:
		return fmt.Errorf("client: %d replicas: want 1 to %d", c.Replicas, MaxReplicas)
	case strings.ContainsAny(c.Name, "\n\r") || len(c.Name) > 255:
		return fmt.Errorf("client: name %q: want one line of at most 255 bytes", c.Name)
	}
	return nil
}
