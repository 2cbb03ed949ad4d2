package client

// Where names the storage node that holds an object's primary copy by the table in
// hand: where work on the object is best done. false if the table does not know.
func (c *Client) Where(ref Ref) (node uint32, ok bool) {
	t := c.current.Load().now.Load().table
	r := t.Region(ref.Addr.Region())
	if r == nil || len(r.Replicas) == 0 {
		return 0, false
	}
	return r.Replicas[0].Node, true
}

// Node finds a storage node by its name in the table in hand.
func (c *Client) Node(name string) (id uint32, ok bool) {
	for _, n := range c.current.Load().now.Load().table.Nodes() {
		if n.Name == name {
			return n.Id, true
		}
	}
	return 0, false
}
