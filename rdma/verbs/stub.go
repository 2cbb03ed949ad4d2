//go:build !cgo || !verbs

package verbs

import (
	"context"
	"log/slog"
	"net"
	"time"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
)

// Built says whether this program can use RDMA devices.
const Built = false

// Dialer is not in this build.
type Dialer struct{}

// NewDialer answers with ErrNotBuilt.
func NewDialer(Config) (*Dialer, error) { return nil, ErrNotBuilt }

// Dial answers with ErrNotBuilt.
func (*Dialer) Dial(context.Context, string, *rdma.Credentials, uint32) (rdma.Conn, error) {
	return nil, ErrNotBuilt
}

func (*Dialer) Provider() string      { return "verbs" }
func (*Dialer) Register([]byte) error { return ErrNotBuilt }
func (*Dialer) Forget([]byte) error   { return nil }
func (*Dialer) Caps() Caps            { return Caps{} }
func (*Dialer) Stats() Stats          { return Stats{} }
func (*Dialer) Close() error          { return nil }

// Server is not in this build.
type Server struct{}

// NewServer answers with ErrNotBuilt.
func NewServer([16]byte, *keyring.Ring, uint32, uint64, host.Limits, Config, *slog.Logger) (*Server, error) {
	return nil, ErrNotBuilt
}

func (*Server) OnLeft(func(serial uint64))                                     {}
func (*Server) Handle(uint16, host.Procedure)                                  {}
func (*Server) Serve(net.Listener) error                                       { return ErrNotBuilt }
func (*Server) OpenRegion(context.Context, uint32, uint64, *host.Memory) error { return ErrNotBuilt }
func (*Server) CloseRegion(context.Context, uint32, uint64) error              { return ErrNotBuilt }
func (*Server) Fence(context.Context, ...uint64) error                         { return ErrNotBuilt }
func (*Server) EndBelow(context.Context, uint64, []uint64) error               { return ErrNotBuilt }
func (*Server) Sessions() []host.SessionStatus                                 { return nil }
func (*Server) Acted() host.Counters                                           { return host.Counters{} }
func (*Server) NewLoop() (*Loop, error)                                        { return nil, ErrNotBuilt }
func (*Server) Registration() (times uint64, took time.Duration)               { return 0, 0 }
func (*Server) Expelled() uint64                                               { return 0 }
func (*Server) VerifiedBytes() uint64                                          { return 0 }
func (*Server) AccessErrors() uint64                                           { return 0 }
func (*Server) Err() <-chan error                                              { return nil }
func (*Server) Events() map[string]uint64                                      { return nil }
func (*Server) Caps() Caps                                                     { return Caps{} }
func (*Server) Close(context.Context) error                                    { return nil }

// Loop is not in this build.
type Loop struct{ host.Loop }

func (*Loop) Close() error { return nil }

// Probe answers with ErrNotBuilt.
func Probe(Config, []byte) (Caps, error) { return Caps{}, ErrNotBuilt }

// NotNative answers with ErrNotBuilt.
func NotNative(Config, []byte) error { return ErrNotBuilt }

// Devices lists nothing.
func Devices() ([]Caps, error) { return nil, ErrNotBuilt }

// Live counts nothing.
func Live() Objects { return Objects{} }
