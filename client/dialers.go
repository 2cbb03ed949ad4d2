package client

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
	"github.com/quarrystore/quarry/rdma/verbs"
)

// fabrics are the providers that a Client can use.
type fabrics struct {
	byName map[string]rdma.Dialer
	verbs  *verbs.Dialer // nil without a usable adapter
	noRDMA error         // why not
}

// openFabrics opens the adapter, if the configuration lets it be used. One that
// cannot be is an error only where RDMA is required.
func openFabrics(cfg *Config) (*fabrics, error) {
	f := &fabrics{byName: map[string]rdma.Dialer{}}
	for _, d := range []rdma.Dialer{shm.NewDialer(), tcp.Dialer{}} {
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

// register makes the scratch memory of a session known to the adapter, so that
// verbs use it where it is. It is pinned as it is used.
func (f *fabrics) register(a *rdma.Arena) error {
	if f.verbs == nil {
		return nil
	}
	return f.verbs.Register(a.Bytes())
}

// forget unpins the scratch memory of a session whose lanes are closed.
func (f *fabrics) forget(a *rdma.Arena) error {
	if f.verbs == nil {
		return nil
	}
	return f.verbs.Forget(a.Bytes())
}

// close gives the adapter back.
// Preconditions: no lane is used any more.
func (f *fabrics) close() error {
	if f.verbs == nil {
		return nil
	}
	if err := f.verbs.Close(); err != nil {
		return errors.Join(errors.New("client: closing the RDMA device"), err)
	}
	return nil
}
