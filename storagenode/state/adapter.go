package state

import "slices"

// This file has the loss of adapters.

// AdapterFailed says that an adapter serves no more, or not all that it should.
type AdapterFailed struct{ Adapter uint32 }

// AdapterRetired says that the Retire of an adapter is done.
type AdapterRetired struct{ Adapter uint32 }

// adapters is how many adapters may serve a replica.
func (s *State) adapters() int { return max(s.Limits.Adapters, 1) }

// LostAdapters are the adapters whose access has ended, for the controllers.
func (s *State) LostAdapters() []uint32 { return slices.Clone(s.retired) }

// adapterFailed has the access through an adapter ended. NoAdapter: it was the last one.
func (s *State) adapterFailed(e AdapterFailed) ([]Action, error) {
	if int(e.Adapter) >= s.adapters() {
		return nil, errorf(Invalid, "adapter %d has failed: the node has %d", e.Adapter, s.adapters())
	}
	if !slices.Contains(s.failed, e.Adapter) {
		if len(s.failed)+1 == s.adapters() {
			return nil, errorf(NoAdapter, "the node has no adapter left")
		}
		s.failed = append(s.failed, e.Adapter)
	}
	return []Action{{Do: Retire, Adapter: e.Adapter}}, nil
}

// adapterRetired has the controllers told of a lost adapter.
func (s *State) adapterRetired(e AdapterRetired) ([]Action, error) {
	if !slices.Contains(s.failed, e.Adapter) {
		return nil, errorf(Invalid, "adapter %d is retired and has not failed", e.Adapter)
	}
	if !slices.Contains(s.retired, e.Adapter) {
		s.retired = append(s.retired, e.Adapter)
	}
	return []Action{{Do: Renew}}, nil
}

// checkAdapter refuses to open a replica at an adapter that is not there or is lost, and an epoch at two of them.
func (s *State) checkAdapter(r *Region, e Open) error {
	switch {
	case int(e.Adapter) >= s.adapters():
		return errorf(Invalid, "region %d: to be opened at adapter %d, the node has %d", r.Number, e.Adapter, s.adapters())
	case slices.Contains(s.failed, e.Adapter):
		return errorf(NoAdapter, "region %d: to be opened at adapter %d, which the node has lost", r.Number, e.Adapter)
	case r.served == e.Epoch && r.adapter != e.Adapter:
		return errorf(Conflict, "region %d: epoch %d is of adapter %d, not of %d", r.Number, e.Epoch, r.adapter, e.Adapter)
	}
	return nil
}
