//go:build cgo && verbs && yardstick

package verbs

// #include "verbs.h"
import "C"

import (
	"errors"
	"net/netip"
)

// Rights of a registration for native FLUSHes, of IB_ACCESS_* of Linux 6.2.
const (
	flushGlobal     = 1 << 8
	flushPersistent = 1 << 9
)

// registers says whether a device registers memory with the rights of a region and more.
func registers(c Config, mem []byte, more int) error {
	d, err := openDevice(c, netip.Addr{})
	if err != nil {
		return err
	}
	pd := C.q_pd(d.ctx)
	if pd == nil {
		return errors.Join(errors.New("no protection domain"), d.close())
	}
	mr, err := register(pd, mem, 0, regionAccess|C.int(more))
	if err == nil {
		err = problem("deregistering", C.q_deregister(mr))
	}
	return errors.Join(err, problem("freeing a protection domain", C.q_free_pd(pd)), d.close())
}
