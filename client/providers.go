package client

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/rdma/verbs"
)

// dialers are the providers that a Client can use. They never change.
type dialers struct {
	byName map[string]rdma.Dialer
	verbs  *verbs.Dialer // nil without a usable adapter
	noRDMA error         // why verbs is nil
}

// openDialers opens the RDMA adapter if the Config allows its use. An adapter that cannot be
// opened is an error only if RDMA is required.
func openDialers(cfg *Config) (*dialers, error) {
	f := &dialers{byName: map[string]rdma.Dialer{}}
	for _, d := range []rdma.Dialer{shm.NewDialer(), cfg.Wire.Dialer(tcp.Dialer{TLS: cfg.FabricTLS})} {
		f.byName[d.Provider()] = d
	}
	if cfg.Transport != TransportAuto && cfg.Transport != TransportVerbs {
		f.noRDMA = fmt.Errorf("the transport is %s", cfg.Transport)
		return f, nil
	}
	device, err := verbs.ParseConfig(cfg.RDMADevice)
	if err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	d, err := verbs.NewDialer(device)
	switch {
	case err == nil:
		f.verbs = d
		f.byName[d.Provider()] = d
	case cfg.RequireRDMA || cfg.Transport == TransportVerbs:
		return nil, fmt.Errorf("client: RDMA is required: %w", err)
	default:
		f.noRDMA = err
	}
	return f, nil
}

// register registers the scratch memory of a session with the adapter, so that verbs need
// not copy it. The adapter pins pages as they are used.
func (f *dialers) register(a *rdma.Arena) error {
	if f.verbs == nil {
		return nil
	}
	return f.verbs.Register(a.Bytes())
}

// forget unpins the scratch memory of a session whose lanes are closed.
func (f *dialers) forget(a *rdma.Arena) error {
	if f.verbs == nil {
		return nil
	}
	return f.verbs.Forget(a.Bytes())
}

// close closes the adapter.
// Preconditions: no lane is in use.
func (f *dialers) close() error {
	if f.verbs == nil {
		return nil
	}
	if err := f.verbs.Close(); err != nil {
		return errors.Join(errors.New("client: closing the RDMA device"), err)
	}
	return nil
}
