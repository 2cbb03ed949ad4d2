package controller

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
)

// Upkeep of etcd. When etcd's file reaches its quota, etcd refuses everything that writes,
// the leases of elections among it: no controller could lead again. Three rules prevent that:
//
//   - Names are the only records whose number clients choose. They are refused where the
//     bytes in use reach a part of the quota (nameShare); the rest is left to the control
//     plane, whose records are bounded by the limits of sessions, nodes and regions. What
//     etcd writes goes into the free part of its file first, so that the file follows the
//     bytes in use but for fragmentation; fileShare bounds the file itself.
//   - The leader compacts the history by size, and to the last seconds while names are, or
//     will soon be, refused: only then do deletions free anything. Each controller
//     defragments its own member where most of the file is free.
//   - A controller whose member is over its quota (started with a smaller quota, or filled by
//     another program) compacts, defragments and disarms the alarm, whether it leads or not.
//
// The second and third rule hold for an etcd that runs inside the controllers. An etcd of
// the operator's is measured, and never changed.
const (
	upkeepEvery   = 5 * time.Second
	upkeepTimeout = 30 * time.Second // a defragmentation copies what is in use
	keepRevisions = 1000             // of the history: a new leader reads the records in pages, at one revision
	keepHistory   = 10 * time.Second // of the history while names are refused

	compactShare = 32 // compact when the bytes in use have grown by quota/compactShare
	defragShare  = 2  // defragment when the file is over quota/defragShare, and mostly free
	warnShare    = 2  // warn when the bytes in use are over quota/warnShare

	// nameShare of 8 is the part of the quota up to which names may fill what is in use, and
	// fileShare of 8 the part up to which they may let the file grow.
	nameShare = 6
	fileShare = 7
	// tightShare of 8 is the part in use from which little history is kept. So it is where the
	// file keeps names from being accepted.
	tightShare = 5
	// recordOverhead is what a change of a name costs in etcd beside its value: key,
	// revision, pages that are not full. A value of more than half a page has pages of its own.
	recordOverhead = 512
	pageBytes      = 4096
	// storeLag is more than the age of what etcd's size lacks: etcd commits to its file ten times a second.
	storeLag = 500 * time.Millisecond
	// quotaUnknown is the quota of a server that does not tell: etcd's default.
	quotaUnknown = 2 << 30
)

// StoreSize is the size of etcd as a controller has seen it last.
type StoreSize struct {
	FileBytes  uint64 // of the file: what the quota is compared with
	UsedBytes  uint64 // of it, in use
	QuotaBytes uint64 // beyond which etcd refuses to write
	Full       bool   // etcd refuses to write
}

// upkeep is what a controller knows of etcd's size.
type upkeep struct {
	size  atomic.Pointer[StoreSize] // nil until it was read
	grown atomic.Uint64             // bytes of name changes that size may lack, at most; the loop alone takes from it
	wake  chan struct{}             // of capacity 1: look now
	// Of the loop alone:
	compacted uint64     // bytes in use after the last compaction
	dropped   int64      // the revision of the last compaction
	seen      []revision // newest last: the last one older than keepHistory, and those after it
	warned    bool       // the log has said that etcd is nearly full
	points    []growth   // what grown was at earlier looks that are younger than storeLag, newest last
}

// growth is what grown was at a time.
type growth struct {
	at    time.Time
	bytes uint64
}

// revision is etcd's revision at a time.
type revision struct {
	at     time.Time
	number int64
}

// watchStore keeps etcd's size known, and small where etcd runs inside the controllers.
func (c *Controller) watchStore() {
	for {
		if err := c.tendStore(); err != nil && c.ctx.Err() == nil {
			c.cfg.Logger.Debug("controller: upkeep of etcd", "error", err)
		}
		select {
		case <-c.ctx.Done():
			return
		case <-c.upkeep.wake:
		case <-time.After(upkeepEvery):
		}
	}
}

// tendStore measures etcd. Where etcd runs inside the controllers it also makes voters of learners,
// compacts the history, defragments the own member, and ends the alarm of a full etcd, in this
// order: each step gives the next one room.
func (c *Controller) tendStore() error {
	ctx, cancel := context.WithTimeout(c.ctx, upkeepTimeout)
	defer cancel()
	u := &c.upkeep
	st, err := c.measureStore(ctx)
	if err != nil {
		return err
	}
	size := u.size.Load()
	c.warnHalfFull(size)
	if !c.cfg.Embedded {
		return nil
	}
	if c.Leads() && !size.Full {
		if err := c.promoteLearners(ctx); err != nil {
			return err
		}
	}
	tight := size.UsedBytes > size.QuotaBytes/8*tightShare || size.FileBytes > size.QuotaBytes/8*fileShare
	keepFrom := u.keepFrom(st.Header.Revision, tight)
	if c.compactionDue(size, keepFrom, tight) {
		if err := c.compact(ctx, keepFrom); err != nil {
			return err
		}
		u.dropped = keepFrom
		if st, err = c.measureStore(ctx); err != nil {
			return err
		}
		size = u.size.Load()
		u.compacted = size.UsedBytes
	}
	u.compacted = min(u.compacted, size.UsedBytes)
	if size.mostlyFree() || size.Full && size.UsedBytes < size.FileBytes {
		if err := c.defragment(ctx, size.Full); err != nil {
			return err
		}
		if st, err = c.measureStore(ctx); err != nil {
			return err
		}
		size = u.size.Load()
	}
	if size.Full && size.FileBytes < size.QuotaBytes/8*fileShare {
		return c.disarm(ctx, st.Header.MemberId, size)
	}
	return nil
}

// compactionDue says whether the history before keepFrom is to be dropped now. The leader does so when the history has
// grown or room is tight; every controller does so when etcd is full.
func (c *Controller) compactionDue(size *StoreSize, keepFrom int64, tight bool) bool {
	u := &c.upkeep
	grown := size.UsedBytes > u.compacted+size.QuotaBytes/compactShare
	return c.Leads() && (grown || tight && keepFrom > u.dropped) || size.Full
}

// disarm ends the alarm with which a full etcd refuses to write.
func (c *Controller) disarm(ctx context.Context, member uint64, size *StoreSize) error {
	m := &clientv3.AlarmMember{MemberID: member, Alarm: etcdserverpb.AlarmType_NOSPACE}
	if _, err := c.cfg.Etcd.AlarmDisarm(ctx, m); err != nil {
		return fmt.Errorf("disarm etcd's alarm: %w", err)
	}
	c.cfg.Logger.Warn("controller: etcd was full and refused to write; its history is compacted and its alarm disarmed", "file_bytes", size.FileBytes, "quota_bytes", size.QuotaBytes)
	_, err := c.measureStore(ctx)
	return err
}

// warnHalfFull logs once each time that etcd becomes more than half full.
func (c *Controller) warnHalfFull(size *StoreSize) {
	over := size.UsedBytes > size.QuotaBytes/warnShare
	if over && !c.upkeep.warned {
		c.cfg.Logger.Warn("controller: etcd is more than half full: delete names that are not needed (quarry name list), or use an etcd of your own with a larger quota",
			"used_bytes", size.UsedBytes, "file_bytes", size.FileBytes, "quota_bytes", size.QuotaBytes)
	}
	c.upkeep.warned = over
}

// endpoints are those of etcd. An etcd inside this process has none, and takes "".
func (c *Controller) endpoints() []string {
	if all := c.cfg.Etcd.Endpoints(); len(all) > 0 || !c.cfg.Embedded {
		return all
	}
	return []string{""}
}

// measureStore reads the size of the fullest endpoint.
func (c *Controller) measureStore(ctx context.Context) (fullest *clientv3.StatusResponse, err error) {
	u := &c.upkeep
	settled := u.settled(time.Now())
	err = errors.New("no endpoint")
	for _, e := range c.endpoints() {
		sctx, cancel := context.WithTimeout(ctx, etcdTimeout) // an endpoint that is gone must not use up the time of the others
		st, serr := c.cfg.Etcd.Status(sctx, e)
		cancel()
		if serr != nil {
			err = serr
			continue
		}
		if fullest == nil || st.DbSize > fullest.DbSize {
			fullest = st
		}
	}
	if fullest == nil {
		return nil, fmt.Errorf("status of etcd: %w", err)
	}
	s := &StoreSize{FileBytes: uint64(fullest.DbSize), UsedBytes: uint64(fullest.DbSizeInUse), QuotaBytes: uint64(max(0, fullest.DbSizeQuota))}
	if s.QuotaBytes == 0 {
		s.QuotaBytes = quotaUnknown
	}
	if len(fullest.Errors) > 0 { // some alarm
		alarms, err := c.cfg.Etcd.AlarmList(ctx)
		if err != nil {
			return nil, fmt.Errorf("alarms of etcd: %w", err)
		}
		for _, a := range alarms.Alarms {
			s.Full = s.Full || a.Alarm == etcdserverpb.AlarmType_NOSPACE
		}
	}
	u.size.Store(s)
	u.take(settled)
	return fullest, nil
}

// settled is how much of grown a size that is read now has: what was there storeLag ago.
func (u *upkeep) settled(now time.Time) (bytes uint64) {
	grown := u.grown.Load()
	if n := len(u.points); n == 0 || u.points[n-1].bytes != grown {
		u.points = append(u.points, growth{now, grown})
	}
	for _, p := range u.points {
		if now.Sub(p.at) >= storeLag {
			bytes = p.bytes
		}
	}
	return bytes
}

// take takes what a size has from grown, and forgets the looks of which that is so.
func (u *upkeep) take(bytes uint64) {
	u.grown.Add(-bytes)
	kept := u.points[:0]
	for _, p := range u.points {
		if p.bytes > bytes {
			kept = append(kept, growth{p.at, p.bytes - bytes})
		}
	}
	u.points = kept
}

// mostlyFree reports that the file is worth a defragmentation, during which its member
// serves nothing: half of it is free, or what is free keeps names from being accepted.
func (s *StoreSize) mostlyFree() bool {
	return s.FileBytes > s.QuotaBytes/defragShare && s.UsedBytes < s.FileBytes/2 ||
		s.FileBytes > s.QuotaBytes/8*fileShare && s.UsedBytes < s.QuotaBytes/8*nameShare
}

// keepFrom is the first revision that a compaction keeps, where now is the newest one: the
// last keepRevisions stay or, if space is tight, those of the last keepHistory if they are
// fewer.
func (u *upkeep) keepFrom(now int64, tight bool) int64 {
	t := time.Now()
	u.seen = append(u.seen, revision{t, now})
	for len(u.seen) > 1 && t.Sub(u.seen[1].at) >= keepHistory {
		u.seen = u.seen[1:]
	}
	keep := now - keepRevisions
	if tight && t.Sub(u.seen[0].at) >= keepHistory {
		keep = max(keep, u.seen[0].number)
	}
	return keep
}

// compact drops the history before a revision.
func (c *Controller) compact(ctx context.Context, keepFrom int64) error {
	if keepFrom <= 0 {
		return nil
	}
	_, err := c.cfg.Etcd.Compact(ctx, keepFrom, clientv3.WithCompactPhysical())
	if err != nil && !errors.Is(err, rpctypes.ErrCompacted) {
		return fmt.Errorf("compact etcd: %w", err)
	}
	return nil
}

// defragment rewrites the file of this controller's member, which serves nothing
// meanwhile: one controller at a time, unless etcd refuses to write anyway.
func (c *Controller) defragment(ctx context.Context, full bool) error {
	if !full {
		s, err := concurrency.NewSession(c.cfg.Etcd, concurrency.WithTTL(int(2*upkeepTimeout/time.Second)), concurrency.WithContext(ctx))
		if err != nil {
			return fmt.Errorf("etcd: %w", err)
		}
		defer s.Close()
		err = concurrency.NewMutex(s, c.cfg.Prefix+"defragments").TryLock(ctx)
		if errors.Is(err, concurrency.ErrLocked) {
			return nil // the next look finds it free
		}
		if err != nil {
			return fmt.Errorf("etcd: %w", err)
		}
	}
	for _, e := range c.endpoints() {
		if _, err := c.cfg.Etcd.Defragment(ctx, e); err != nil {
			return fmt.Errorf("defragment etcd: %w", err)
		}
	}
	return nil
}

// recordBytes is what a change of a name takes of etcd's file, for a value of so many bytes.
func recordBytes(value int) uint64 {
	n := uint64(value) + recordOverhead
	if value > pageBytes/2 {
		n = (n + pageBytes - 1) / pageBytes * pageBytes
	}
	return n
}

// roomForNames refuses a change of names that would leave the control plane too little
// of etcd.
func (c *Controller) roomForNames(bytes int) error {
	u := &c.upkeep
	s := u.size.Load()
	if s == nil {
		return nil // etcd's size has not been read yet: etcd has just begun to answer
	}
	n := recordBytes(bytes)
	grown := u.grown.Load() + n
	if grown > s.QuotaBytes/compactShare {
		select { // sizes are to be read sooner
		case u.wake <- struct{}{}:
		default:
		}
	}
	used := s.UsedBytes + grown
	if used > s.QuotaBytes/8*nameShare || max(s.FileBytes, used) > s.QuotaBytes/8*fileShare {
		return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("no room for names: etcd uses %d of %d bytes, and the last quarter is for the control plane. Delete names that are not needed: their space is free within a minute", s.UsedBytes, s.QuotaBytes))
	}
	u.grown.Add(n)
	return nil
}
