package host

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/quarrystore/quarry/internal/clock"
	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
)

// A goroutine compares each watched word with the value that its client has seen, because one-sided commits do not run code on the
// node. It runs while words are watched.
//
// Invariant: a word that differs from what the client has named, or was told last, is in the queue of its set, or the next
// pass puts it there. So a change between the client's READ and its message is found, whatever the order.
//
// Invariant: every word that the goroutine loads lies in a region that is served: cut takes words out before a region's memory
// is given back.

const (
	// After a pass that found a change the next one follows in quickPass. Without changes the pause doubles up to idlePass. It is at
	// least ranShare times as long as the pass took after a change, and idleShare times otherwise, so that a pass costs a bounded share of a
	// processor; but longestRest at most, which the passes over more than some 4000 words reach.
	quickPass   = 50 * time.Microsecond
	idlePass    = 10 * time.Millisecond
	longestRest = 100 * time.Millisecond
	idleShare   = 250
	// A pass that a chain of this process asks for comes at once, but after the pass before by ranShare times as long as that took.
	// While such passes find nothing, this distance doubles up to longestGap.
	ranShare   = 4
	longestGap = 500 * time.Microsecond
	// stepWords is how many words a pass looks at before others have a turn at the lock.
	stepWords = 1024

	// longestHold bounds how long a wait is held.
	longestHold = 30 * time.Second
	// A set is removed when no message has named it for setExpiry.
	setExpiry = 2 * time.Minute
	// maxSets bounds the sets of a session: a connection that has broken leaves one behind.
	maxSets = 4
)

// watches are the words that clients watch.
type watches struct {
	some atomic.Bool   // there are words
	bell chan struct{} // of capacity 1: this process has executed an atomic

	mu      sync.Mutex // guards what follows; taken behind Access.mu, and held for a step of a pass
	sets    map[setID]*watchSet
	words   int  // of all sets
	running bool // the goroutine is there
}

// setID names a set: number is its client's choice.
type setID struct{ serial, number uint64 }

// watchSet are the words of one client.
type watchSet struct {
	words []watched
	index map[uint32]int // place in words, by id
	queue []uint32       // ids of words to tell; forget bounds those that were dropped
	ready chan struct{}  // of capacity 1: queue is not empty
	until int64          // of the wait that is held; 0: none is
	heard int64          // when its client was heard last
}

// watched is one word.
type watched struct {
	at     *uint64 // in the memory of a region; nil: gone
	seen   uint64
	id     uint32
	region uint32
	told   bool // it is in the queue
}

func (w *watches) init() { w.bell, w.sets = make(chan struct{}, 1), map[setID]*watchSet{} }

var (
	errNoSet   = errors.New("no such set of watched words")
	errWatches = errors.New("the node watches as many words as it may, or a quarter of them for this session (host.Limits)")
)

// watch is the procedure msg.Watch.
func (a *Access) watch(from *rdma.Ticket, request, answer []byte) (int, error) {
	op, number, rest, err := msg.ParseWatch(request)
	if err != nil {
		return 0, err
	}
	w, id := &a.watches, setID{from.Serial, number}
	switch op {
	case msg.WatchAdd:
		return 0, a.addWatches(from, id, rest)
	case msg.WatchDrop:
		return 0, w.drop(id, rest)
	}
	hold := min(time.Duration(binary.LittleEndian.Uint32(rest))*time.Millisecond, longestHold)
	return w.wait(id, hold, answer)
}

// addWatches adds words to a set, which it makes if there is none. For a word in a region that the session may not read, or that
// the node does not serve under the epoch, the answer is WatchGone.
func (a *Access) addWatches(from *rdma.Ticket, id setID, rest []byte) error {
	w := &a.watches
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed || !a.ended.Admits(id.serial) {
		return rdma.ErrRevoked
	}
	words, err := a.watchedWords(from, rest)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	s, err := w.room(id, words, a.limits.Watches)
	if err != nil {
		return err
	}
	for i := range words {
		w.put(s, words[i])
	}
	return nil
}

// watchedWords finds the words of a request in memory.
// Preconditions: Access.mu is held.
func (a *Access) watchedWords(from *rdma.Ticket, rest []byte) (words []watched, err error) {
	err = msg.WatchWords(rest, func(x msg.WatchWord) error {
		word := watched{seen: x.Seen, id: x.ID, region: x.Region}
		r := a.regions[x.Region]
		if r != nil && r.memory != nil && r.epoch == x.Epoch && r.tenant == from.Tenant {
			size := uint64(len(r.memory.mem))
			if x.Off&7 != 0 || x.Off >= size {
				return fmt.Errorf("watched word at %#x: %w", x.Off, rdma.ErrBounds)
			}
			word.at = wordAt(r.memory.mem, x.Off)
		}
		words = append(words, word)
		return nil
	})
	return words, err
}

// room returns the set to which words are to be added, and makes it if there is none. A session has a quarter of the node's words and maxSets
// sets. Other sets of the session make room, the one first whose client was heard longest ago: a client uses one set, and has
// given up the others. An error has changed nothing.
// Preconditions: mu is held.
func (w *watches) room(id setID, words []watched, most int) (*watchSet, error) {
	s := w.sets[id]
	var others []setID
	fresh, kept, own := len(words), 0, 0
	if s != nil {
		kept = len(s.words)
		for i := range words {
			if _, known := s.index[words[i].id]; known {
				fresh--
			}
		}
	}
	for other, o := range w.sets {
		if other != id && other.serial == id.serial {
			others = append(others, other)
			own += len(o.words)
		}
	}
	if kept+fresh > most/4 || w.words-own+fresh > most {
		return nil, errWatches
	}
	slices.SortFunc(others, func(a, b setID) int { return cmp.Compare(w.sets[a].heard, w.sets[b].heard) })
	for len(others) >= maxSets || own > 0 && (own+kept+fresh > most/4 || w.words+fresh > most) {
		own -= len(w.sets[others[0]].words)
		w.remove(others[0])
		others = others[1:]
	}
	if s == nil {
		s = &watchSet{index: map[uint32]int{}, ready: make(chan struct{}, 1)}
		w.sets[id] = s
	}
	s.heard = clock.Now()
	return s, nil
}

// remove forgets a set. A call that is held for it ends.
// Preconditions: mu is held.
func (w *watches) remove(id setID) {
	s := w.sets[id]
	w.words -= len(s.words)
	delete(w.sets, id)
	s.wake()
}

// put adds a word to a set, in the place of one with its id.
// Preconditions: mu is held, there is room.
func (w *watches) put(s *watchSet, word watched) {
	i, known := s.index[word.id]
	if known {
		word.told = s.words[i].told
		s.words[i] = word
	} else {
		i = len(s.words)
		s.words = append(s.words, word)
		s.index[word.id] = i
		w.words++
	}
	if word.at == nil {
		s.words[i].seen = msg.WatchGone
		s.tell(i)
	} else if now := atomic.LoadUint64(word.at); now != word.seen {
		s.words[i].seen = now
		s.tell(i)
	}
	w.some.Store(true)
	if !w.running {
		w.running = true
		go w.run()
	}
}

// tell puts a word into the queue.
func (s *watchSet) tell(i int) {
	if x := &s.words[i]; !x.told {
		x.told = true
		s.queue = append(s.queue, x.id)
	}
	s.wake()
}

// wake has the call asked again that is held for the set.
func (s *watchSet) wake() {
	select {
	case s.ready <- struct{}{}:
	default:
	}
}

// forget takes word i out of a set. Its place in the queue goes when there are many such.
func (w *watches) forget(s *watchSet, i int) {
	delete(s.index, s.words[i].id)
	last := len(s.words) - 1
	if i < last {
		s.words[i] = s.words[last]
		s.index[s.words[i].id] = i
	}
	s.words = s.words[:last]
	w.words--
	if len(s.queue) > 2*len(s.words)+16 {
		s.queue = s.queue[:0]
		for i := range s.words {
			if s.words[i].told {
				s.queue = append(s.queue, s.words[i].id)
			}
		}
	}
}

// drop forgets words of a set.
func (w *watches) drop(id setID, rest []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.sets[id]
	if s == nil {
		return errNoSet
	}
	s.heard = clock.Now()
	for ; len(rest) >= 4; rest = rest[4:] {
		if i, ok := s.index[binary.LittleEndian.Uint32(rest)]; ok {
			w.forget(s, i)
		}
	}
	return nil
}

// wait answers with words of a set that have changed. It is held until there are some, or the time is up.
func (w *watches) wait(id setID, hold time.Duration, answer []byte) (n int, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.sets[id]
	if s == nil {
		return 0, errNoSet
	}
	s.heard = clock.Now()
	if s.until == 0 {
		s.until = s.heard + int64(hold)
	}
	entries := 0
	for len(s.queue) > 0 && entries < msg.MaxWatchTold {
		i, ok := s.index[s.queue[0]]
		s.queue = s.queue[1:] // before forget, which may shorten the rest
		if !ok || !s.words[i].told {
			continue
		}
		x := &s.words[i]
		n = msg.PutWatchTold(answer, entries, x.id, x.seen)
		entries++
		if x.told = false; x.at == nil {
			w.forget(s, i)
		}
	}
	if entries > 0 || s.heard >= s.until {
		s.until = 0
		return n, nil
	}
	select { // of words that were told, or dropped since
	case <-s.ready:
	default:
	}
	return 0, &Held{Ready: s.ready, Until: s.until}
}

// cut takes the words of a region away: it is not served any more.
func (w *watches) cut(region uint32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.sets {
		for i := range s.words {
			if x := &s.words[i]; x.region == region && x.at != nil {
				x.at, x.seen = nil, msg.WatchGone
				s.tell(i)
			}
		}
	}
}

// end forgets the sets of sessions.
func (w *watches) end(which func(serial uint64) bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id := range w.sets {
		if which(id.serial) {
			w.remove(id)
		}
	}
	w.ring()
}

// ran has the words looked at if this process has executed an atomic: it may have been a commit.
func (w *watches) ran(verbs []rdma.Verb) {
	for i := range verbs {
		if verbs[i].Op == rdma.CompareSwap {
			w.ring()
			return
		}
	}
}

// ring wakes the goroutine that looks.
func (w *watches) ring() {
	select {
	case w.bell <- struct{}{}:
	default:
	}
}

// run looks at the words until there are none.
func (w *watches) run() {
	rest, gap := quickPass, time.Duration(0)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		changed, took, more := w.pass(clock.Now())
		if !more {
			return
		}
		rest, gap = pause(changed, took, rest, gap)
		ended := clock.Now()
		timer.Reset(rest)
		select {
		case <-timer.C:
			continue
		case <-w.bell:
		}
		timer.Stop()
		if left := gap - time.Duration(clock.Now()-ended); left > 0 {
			time.Sleep(left)
		}
	}
}

// pause is how long the goroutine rests after a pass, and how long at least when it is rung for. rest and gap are those before the pass.
func pause(changed bool, took, rest, gap time.Duration) (time.Duration, time.Duration) {
	least := min(ranShare*took, longestRest)
	if changed {
		return min(quickPass+least, longestRest), least
	}
	return min(max(min(2*rest, idlePass), idleShare*took), longestRest), max(min(2*gap, longestGap), least)
}

// pass looks at every word once. took is how long it has looked. more: there are words.
func (w *watches) pass(now int64) (changed bool, took time.Duration, more bool) {
	for _, id := range w.expire(now) {
		for below := math.MaxInt; below > 0; {
			var found bool
			var step time.Duration
			below, found, step = w.look(id, below)
			changed, took = changed || found, took+step
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.words == 0 {
		w.running = false
		w.some.Store(false)
	}
	return changed, took, w.words > 0
}

// expire forgets sets whose clients are gone, and returns the others.
func (w *watches) expire(now int64) (sets []setID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, s := range w.sets {
		if now-s.heard > int64(setExpiry) {
			w.remove(id)
			continue
		}
		sets = append(sets, id)
	}
	return sets
}

// look is a step of a pass: it compares the last stepWords of the words of a set that are below a place, and returns where the next step goes
// on; 0: there is none. A word that takes the place of a forgotten one moves down, so a pass looks at it again rather than never.
func (w *watches) look(id setID, below int) (next int, changed bool, took time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.sets[id]
	if s == nil {
		return 0, false, 0
	}
	began := clock.Now() // the wait for the lock is no part of the step
	below = min(below, len(s.words))
	next = max(0, below-stepWords)
	for i := next; i < below; i++ {
		x := &s.words[i]
		if x.at == nil {
			continue
		}
		if word := atomic.LoadUint64(x.at); word != x.seen {
			x.seen, changed = word, true
			s.tell(i)
		}
	}
	return next, changed, time.Duration(clock.Now() - began)
}

// Watched is how many words clients watch.
func (a *Access) Watched() int {
	a.watches.mu.Lock()
	defer a.watches.mu.Unlock()
	return a.watches.words
}
