package etcdembed

import (
	"time"
	_ "unsafe" // for go:linkname

	_ "go.etcd.io/etcd/server/v3/storage/mvcc"
)

// watchResyncPeriod is how often etcd's store looks for watchers that began at a past revision and have not caught
// up. Each look is a wake, also where there is no such watcher: 10 of an idle controller's 40 a second. etcd has no
// setting for it, and a variable only so that its tests can change it.
//
//go:linkname watchResyncPeriod go.etcd.io/etcd/server/v3/storage/mvcc.watchResyncPeriod
var watchResyncPeriod time.Duration

// resyncEvery delays the first event of such a watcher. A controller has one for a moment after it has
// begun to wait for the candidate before it; the watch of a standby has long caught up when its leader ends.
const resyncEvery = 400 * time.Millisecond

// etcdResync is etcd's own period, of which a test sees that the variable is still there.
var etcdResync time.Duration

func init() { etcdResync, watchResyncPeriod = watchResyncPeriod, resyncEvery }
