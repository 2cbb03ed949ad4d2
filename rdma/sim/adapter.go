package sim

// This file has nodes with several adapters, each of which is a domain of atomics.

// DialAt connects a session to a node through one of its adapters.
func (f *Fabric) DialAt(session uint32, n *Node, adapter int) (*Conn, error) {
	c, err := f.Dial(session, n)
	if err != nil {
		return nil, err
	}
	if c.via = adapter + 1; c.cutOff() {
		c.broken = true // as a connection that nothing answers
	}
	return c, nil
}

// Via is the adapter that the connection was dialled at, counted from 1; 0: the node's own way.
func (c *Conn) Via() int { return c.via }

// cutOff says whether the connection's adapter has failed.
func (c *Conn) cutOff() bool { return c.via > 0 && c.node.Lost(c.via-1) }

// reaches says whether a connection may have a key of memory: it goes by the adapter that serves it.
func (c *Conn) reaches(m *Memory) bool { return c.via == 0 || c.via == m.adapter+1 }

// OpenAt gives access under an epoch through one adapter, with a new key.
func (m *Memory) OpenAt(adapter int, epoch uint64) {
	m.shared = m.shared || m.key != 0 && m.adapter != adapter
	m.adapter = adapter
	m.Open(epoch)
}

// Adapter is the one that the memory was opened at last.
func (m *Memory) Adapter() int { return m.adapter }

// Shared says whether two adapters have keys: an atomic of the one is not atomic towards one of the other.
func (m *Memory) Shared() bool { return m.shared }

// Lost says whether an adapter has failed in this incarnation of the node.
func (n *Node) Lost(adapter int) bool { return n.lost>>adapter&1 != 0 }

// Fail cuts off the connections of an adapter. removed: the kernel has taken the device away, and with it all access. Else what is
// posted may run at any later time, until Retire.
func (n *Node) Fail(adapter int, removed bool) {
	n.lost |= 1 << adapter
	for _, c := range n.fabric.conns {
		if c != nil && c.node == n && (c.via == adapter+1 || c.via == 0 && n.fabric.Choose(2) == 1) {
			c.Break()
		}
	}
	if removed {
		n.Retire(adapter)
	}
}

// Retire ends all access through an adapter: nothing that was posted there runs any more.
func (n *Node) Retire(adapter int) {
	for _, m := range n.mems {
		if m.adapter == adapter {
			m.Close()
		}
	}
	for _, c := range n.fabric.conns {
		if c != nil && c.node == n && c.via == adapter+1 {
			c.Break()
			c.drop()
		}
	}
}
