package storagenode

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// Config of a node. Controllers is needed.
type Config struct {
	// Controllers are base URLs, one or more.
	Controllers []string
	// Name in the cluster, unique; default the host's name.
	Name string
	// FailureDomain is /dc/rack/host; default /default/default/NAME. Replicas of a
	// region lie in different ones.
	FailureDomain string
	// Dir keeps regions as files, and what the node must remember across restarts.
	// "" keeps regions in anonymous memory: a restarted node has nothing.
	Dir string
	// CapacityBytes of all regions together; default 64 GiB. Memory is used when touched.
	CapacityBytes uint64
	// Listen is the address of the tcp fabric; default 127.0.0.1:0.
	Listen string
	// AgentListen is the address that controllers call; default 127.0.0.1:0.
	AgentListen string
	// Socket is the path of the shm fabric's socket; default in the system's folder
	// for temporary files. "none" serves no shm.
	Socket string
	// Token is the cluster's token, where it asks for one.
	Token string
	// TLS serves the agent port; ControllerTLS is for https controllers.
	TLS, ControllerTLS *tls.Config
	// Logger; nil means slog.Default.
	Logger *slog.Logger
}

const (
	defaultCapacity = 64 << 30
	noSocket        = "none"
	maxNameBytes    = 64
)

var domain = regexp.MustCompile(`^(/[A-Za-z0-9._-]{1,64}){1,8}$`)

func (c Config) withDefaults() Config {
	if c.Name == "" {
		c.Name, _ = os.Hostname()
	}
	if c.FailureDomain == "" {
		c.FailureDomain = "/default/default/" + c.Name
	}
	if c.CapacityBytes == 0 {
		c.CapacityBytes = defaultCapacity
	}
	if c.Listen == "" {
		c.Listen = "127.0.0.1:0"
	}
	if c.AgentListen == "" {
		c.AgentListen = "127.0.0.1:0"
	}
	if c.Socket == "" {
		c.Socket = filepath.Join(os.TempDir(), fmt.Sprintf("quarry-%d-%s.sock", os.Getpid(), c.Name))
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

func (c Config) validate() error {
	switch {
	case len(c.Controllers) == 0:
		return errors.New("storage node: no controller given: set --controllers, such as http://127.0.0.1:7420")
	case c.Name == "" || len(c.Name) > maxNameBytes || strings.ContainsAny(c.Name, "/\n\r\x00 "):
		return fmt.Errorf("storage node: name %q: want 1 to %d bytes without slashes or spaces", c.Name, maxNameBytes)
	case !domain.MatchString(c.FailureDomain):
		return fmt.Errorf("storage node: failure domain %q: want /dc/rack/host, up to 8 parts of letters, digits, . _ -", c.FailureDomain)
	}
	return nil
}

// fetchTimeout bounds one call of a controller; retryEvery is the pause between tries.
const (
	fetchTimeout = 3 * time.Second
	retryEvery   = 200 * time.Millisecond
	stopTimeout  = 5 * time.Second
)
