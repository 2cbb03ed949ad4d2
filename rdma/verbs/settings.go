//go:build cgo && verbs && yardstick

package verbs

// #include "verbs.h"
import "C"

import (
	"errors"
	"net/netip"
)

const (
	remoteRead   = C.IBV_ACCESS_REMOTE_READ
	remoteWrite  = C.IBV_ACCESS_REMOTE_WRITE
	remoteAtomic = C.IBV_ACCESS_REMOTE_ATOMIC
)

// settings is what a queue pair is set to, as the device says.
type settings struct {
	readsOut, readsIn   int   // READs and atomics under way: as requester, as responder
	timeout             int   // 4.096 us << timeout
	retries, rnrRetries int   // of a lost packet, and of one that the receiver was not ready for
	serviceLevel        int   // of InfiniBand
	trafficClass        int   // of RoCE packets: DSCP and ECN
	pkeyIndex           int   // place of the partition's key in the port's table
	mtu                 int   // bytes
	access              C.int // what the queue pair lets the other end do
}

// querySettings asks the adapter what a queue pair was set to.
func querySettings(qp *C.struct_ibv_qp) (settings, error) {
	var q C.q_settings
	if e := C.q_query(qp, &q); e != 0 {
		return settings{}, problem("asking for a queue pair's settings", e)
	}
	return settings{
		readsOut: int(q.reads_out), readsIn: int(q.reads_in), timeout: int(q.timeout), retries: int(q.retries), rnrRetries: int(q.rnr_retries),
		serviceLevel: int(q.service_level), trafficClass: int(q.traffic_class), pkeyIndex: int(q.pkey_index), mtu: int(q.mtu_bytes), access: C.int(q.access),
	}, nil
}

// ends are the settings of a lane's two queue pairs.
func (s *Server) ends(c *conn) (client, node settings, err error) {
	if client, err = querySettings(c.lane.qp); err != nil {
		return client, node, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return client, node, s.sessions[c.as.Serial].lanes[c.number].settings(&node)
}

// settings asks for those of the lane's queue pair.
func (l *lane) settings(out *settings) (err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	*out, err = querySettings(l.qp)
	return err
}

// lost posts nothing, as a device seems to that never completes what it was given.
var lost = func(C.uint64_t) C.int { return 0 }

// chooseBehind is the address that is chosen where a foreign one has the better score.
func chooseBehind(foreign string) (string, error) {
	good, err := openDevice(Config{}, netip.Addr{})
	if err != nil {
		return "", err
	}
	list := C.ibv_get_device_list(nil)
	defer C.ibv_free_device_list(list)
	own := candidate{device: deviceList(list, 1)[0], caps: good.caps, scope: good.scope}
	other := own
	other.caps.GID = netip.MustParseAddr(foreign)
	got, err := choose([]candidate{other, other, own}, good.config)
	if err != nil {
		return "", errors.Join(err, good.close())
	}
	return got.caps.GID.String(), errors.Join(got.close(), good.close())
}
