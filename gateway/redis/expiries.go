package redis

import (
	"container/heap"
	"context"
	"time"
)

// expiries say when keys expire: of those with a short record all, which the feed has seen, and of longer strings those that a client which tracks
// has read. A key that expires does not change in the tree before a sweep removes it, which may be long after.
type expiries struct {
	at   map[string]int64 // when each key expires, ms, by the tree's key
	next expiryHeap       // of the keys; also what does not hold any more
}

// expiry is when a key expires.
type expiry struct {
	at  int64
	key string
}

// expiryHeap has the first one in front.
type expiryHeap []expiry

func (h expiryHeap) Len() int           { return len(h) }
func (h expiryHeap) Less(i, j int) bool { return h[i].at < h[j].at }
func (h expiryHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *expiryHeap) Push(x any)        { *h = append(*h, x.(expiry)) }
func (h *expiryHeap) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

// set notes when a key expires; 0: never.
func (m *expiries) set(key string, at int64) {
	if at == 0 {
		delete(m.at, key)
		return
	}
	if m.at == nil {
		m.at = map[string]int64{}
	}
	m.at[key] = at
	if len(m.next) > 2*len(m.at)+1024 {
		m.next = m.next[:0]
		for key, at := range m.at {
			m.next = append(m.next, expiry{at, key})
		}
		heap.Init(&m.next)
		return
	}
	heap.Push(&m.next, expiry{at, key})
}

// due takes a key that has expired; false: there is none.
func (m *expiries) due(now int64) (key string, ok bool) {
	for len(m.next) > 0 && m.next[0].at <= now {
		d := heap.Pop(&m.next).(expiry)
		if m.at[d.key] == d.at {
			delete(m.at, d.key)
			return d.key, true
		}
	}
	return "", false
}

// expires notes when a key of the tree expires; 0: never.
func (f *feed) expires(key []byte, at int64) {
	f.expiryMu.Lock()
	defer f.expiryMu.Unlock()
	if f.expiries.at[string(key)] != at {
		f.expiries.set(string(key), at)
	}
}

// kept notes when a key expires that a client may keep.
func (c *conn) kept(key []byte, r *record) {
	if r.expiry != 0 && r.kind != kindNone && c.tracks.on {
		c.s.feed.expires(key, r.expiry)
	}
}

// tellExpired tells of keys that have expired, and has them removed, until ctx ends.
func (f *feed) tellExpired(ctx context.Context) {
	tick := time.NewTicker(sweepTick)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		for now := f.s.clock().UnixMilli(); ; {
			f.expiryMu.Lock()
			key, ok := f.expiries.due(now)
			f.expiryMu.Unlock()
			if !ok {
				break
			}
			f.s.changed([]byte(key[1:]), nil)
			f.s.expired([]byte(key), 0)
		}
	}
}
