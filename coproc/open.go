//go:build !wasip1

package coproc

import (
	"context"
	"errors"

	"github.com/quarrystore/quarry/client"
)

// Memory allocates, reads, writes and frees objects, and has nothing else (US 2017/0149890 [0035]-[0037]:
// the co-processor between an application and the memory it uses). Safe for many
// goroutines.
type Memory struct {
	c   *client.Client  // the process's client
	ctx context.Context // bounds every call
}

// Open connects to a cluster, over the best transport of this host to each node: an RDMA adapter,
// shared memory, or tcp. Certificates, token and keys are those of client.ConfigFromEnvironment. The context bounds all calls of the Memory.
func Open(ctx context.Context, controllers ...string) (*Memory, error) {
	if len(controllers) == 0 {
		return nil, errors.New("coproc: no controller named")
	}
	cfg, err := client.ConfigFromEnvironment()
	if err != nil {
		return nil, err
	}
	cfg.Controllers = controllers
	c, err := client.Connect(ctx, cfg)
	if err != nil {
		return nil, err
	}
	return &Memory{c, ctx}, nil
}

// Call calls a function on one object, beside the memory that has it: see client.Client.Call.
func Call(ctx context.Context, c *client.Client, ref Ref, function string, args []byte) (answer []byte, err error) {
	return c.Call(ctx, ref, function, args)
}

// Alloc makes an object.
func (m *Memory) Alloc(payload []byte) (Ref, error) {
	return m.c.Alloc(m.ctx, payload, client.AllocOptions{})
}

// Read appends an object's payload to dst.
func (m *Memory) Read(ref Ref, dst []byte) ([]byte, error) { return m.c.Read(m.ctx, ref, dst) }

// Write replaces an object's payload.
func (m *Memory) Write(ref Ref, payload []byte) error { return m.c.Write(m.ctx, ref, payload) }

// Free ends an object.
func (m *Memory) Free(ref Ref) error { return m.c.Free(m.ctx, ref) }

// Ways says how each storage node that was used is reached: the provider by the
// node's number.
func (m *Memory) Ways() map[uint32]string { return m.c.Stats().Providers }

// Close ends the session of the Memory. Objects stay.
func (m *Memory) Close() error { return m.c.Close() }
