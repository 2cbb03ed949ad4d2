package client

import (
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/shm"
	"github.com/quarrystore/quarry/rdma/tcp"
)

// dialers are the providers of this build, by name.
func dialers() map[string]rdma.Dialer {
	m := map[string]rdma.Dialer{}
	for _, d := range []rdma.Dialer{shm.NewDialer(), tcp.Dialer{}} {
		m[d.Provider()] = d
	}
	return m
}
