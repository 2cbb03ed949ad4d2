package redis

import (
	"container/heap"
	"context"
	"time"
)

// mortals are the keys that will expire: of those with a short record all, which the feed has seen, and of longer strings those that a client which tracks
// has read. A key that expires does not change in the tree before a sweep removes it, which may be long after.
type mortals struct {
	at   map[string]int64 // when each key expires, ms, by the tree's key
	next deaths           // of the keys; also what does not hold any more
}

// death is when a key expires.
type death struct {
	at  int64
	key string
}

// deaths is a heap.
type deaths []death

func (d deaths) Len() int           { return len(d) }
func (d deaths) Less(i, j int) bool { return d[i].at < d[j].at }
func (d deaths) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }
func (d *deaths) Push(x any)        { *d = append(*d, x.(death)) }
func (d *deaths) Pop() any {
	last := (*d)[len(*d)-1]
	*d = (*d)[:len(*d)-1]
	return last
}

// set notes when a key expires; 0: never.
func (m *mortals) set(key string, at int64) {
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
			m.next = append(m.next, death{at, key})
		}
		heap.Init(&m.next)
		return
	}
	heap.Push(&m.next, death{at, key})
}

// due takes a key that has expired; false: there is none.
func (m *mortals) due(now int64) (key string, ok bool) {
	for len(m.next) > 0 && m.next[0].at <= now {
		d := heap.Pop(&m.next).(death)
		if m.at[d.key] == d.at {
			delete(m.at, d.key)
			return d.key, true
		}
	}
	return "", false
}

// dies notes when a key of the tree expires; 0: never.
func (f *feed) dies(key []byte, at int64) {
	f.dying.Lock()
	defer f.dying.Unlock()
	if f.mortals.at[string(key)] != at {
		f.mortals.set(string(key), at)
	}
}

// kept notes when a key expires that a client may keep.
func (c *conn) kept(key []byte, r *record) {
	if r.expiry != 0 && r.kind != kindNone && c.tracks.on {
		c.s.feed.dies(key, r.expiry)
	}
}

// bury tells of keys that have expired, and has them removed, until ctx ends.
func (f *feed) bury(ctx context.Context) {
	tick := time.NewTicker(sweepTick)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		for now := f.s.clock().UnixMilli(); ; {
			f.dying.Lock()
			key, ok := f.mortals.due(now)
			f.dying.Unlock()
			if !ok {
				break
			}
			f.s.changed([]byte(key[1:]), nil)
			f.s.expired([]byte(key), 0)
		}
	}
}
