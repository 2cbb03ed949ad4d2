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
	verbs  []adapter // none without a usable adapter
	noRDMA error     // why verbs is empty
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
	devices, err := verbs.ParseConfigs(cfg.RDMADevice)
	if err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	for _, device := range devices {
		d, err := verbs.NewDialer(device)
		if err != nil {
			f.noRDMA = errors.Join(f.noRDMA, err)
			continue
		}
		f.verbs = append(f.verbs, adapter{d, device.Rail})
	}
	switch {
	case len(f.verbs) > 0:
		if f.noRDMA != nil {
			cfg.Logger.Warn("fabric: some RDMA devices are not used", "reason", f.noRDMA)
			f.noRDMA = nil
		}
		f.byName[TransportVerbs] = f.verbs[0]
	case cfg.RequireRDMA || cfg.Transport == TransportVerbs:
		return nil, fmt.Errorf("client: RDMA is required: %w", f.noRDMA)
	}
	return f, nil
}

// register registers the scratch memory of a session with the adapters, so that verbs need
// not copy it. The adapters pin pages as they are used.
func (f *dialers) register(a *rdma.Arena) error {
	return f.each(func(d adapter) error { return d.Register(a.Bytes()) })
}

// forget unpins the scratch memory of a session whose lanes are closed.
func (f *dialers) forget(a *rdma.Arena) error {
	return f.each(func(d adapter) error { return d.Forget(a.Bytes()) })
}

// close closes the adapters.
// Preconditions: no lane is in use.
func (f *dialers) close() error {
	if err := f.each(func(d adapter) error { return d.Close() }); err != nil {
		return errors.Join(errors.New("client: closing the RDMA device"), err)
	}
	return nil
}

// each calls do for every adapter.
func (f *dialers) each(do func(adapter) error) error {
	var errs []error
	for _, d := range f.verbs {
		errs = append(errs, do(d))
	}
	return errors.Join(errs...)
}
