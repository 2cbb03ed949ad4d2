//go:build cgo && verbs

package verbs

// #include "verbs.h"
import "C"

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// removal waits for a device to be removed. The kernel announces it on every id of the
// connection manager on that device, and removes the device when all of them are destroyed.
type removal struct {
	events *C.struct_rdma_event_channel // channel on which the kernel announces the removal
	id     *C.struct_rdma_cm_id         // bound to the device, so that the kernel announces it
	file   *os.File                     // a copy of the channel's descriptor, for the poller
	ended  chan struct{}                // closed when the goroutine that waits has ended
}

// watch calls removed, once, if the device is removed before close.
func (d *device) watch(removed func()) (*removal, error) {
	w := &removal{ended: make(chan struct{})}
	at := d.at(d.caps.GID.As16(), 0)
	if e := C.q_watch(d.ctx, C.uint8_t(d.caps.Port), &at, &w.events, &w.id); e != 0 {
		return nil, fmt.Errorf("%w: %s port %d cannot use %v: %w: give that address to its network interface, or choose another one with the device",
			ErrDevice, d.caps.Device, d.caps.Port, d.caps.GID, unix.Errno(e))
	}
	fd, err := unix.FcntlInt(uintptr(w.events.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		C.q_listen_close(w.events, w.id)
		return nil, fmt.Errorf("events of %s: %w", d.caps.Device, err)
	}
	w.file = os.NewFile(uintptr(fd), "rdma_cm")
	go func() {
		defer close(w.ended)
		raw, err := w.file.SyscallConn()
		if err != nil {
			return
		}
		gone := false
		err = raw.Read(func(uintptr) bool {
			gone = C.q_removed(w.events) != 0
			return gone
		})
		if err == nil && gone {
			removed()
		}
	}()
	return w, nil
}

// close ends the watch for the adapter's removal.
func (w *removal) close() error {
	w.file.Close()
	<-w.ended
	return problem("leaving the connection manager", C.q_listen_close(w.events, w.id))
}
