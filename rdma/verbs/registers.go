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
	refused, err := d.registers(mem, regionAccess|C.int(more))
	return errors.Join(refused, err, d.close())
}
