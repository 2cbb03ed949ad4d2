package rdma

// Buffers hands out memory that verbs can read from and write to. It lies
// outside the Go heap, so that a device can be given its address; devices
// register it whole. Slabs of buffers are never returned one by one: a lane
// allocates what it needs for its lifetime, Close returns all.
type Buffers interface {
	// Alloc returns n zeroed bytes aligned to 64.
	Alloc(n int) ([]byte, error)
}
