package storagenode

import (
	"sync"
	"sync/atomic"
	"time"
)

// speed is how fast a program passes memory, for status and its bar.
type speed struct {
	passed atomic.Uint64 // bytes

	mu   sync.Mutex // guards the fields below
	at   int64      // when rate was last taken
	was  uint64     // passed, at that time
	rate uint64     // bytes a second
}

// speedOver is the least time over which a speed is measured, so that the shown number changes no
// more often.
const speedOver = int64(time.Second)

func (s *speed) began(now int64) { s.at = now }

// lately is the speed between the last two calls that lie speedOver apart; before there are two, the
// mean since the beginning.
func (s *speed) lately(now int64) uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	took, passed := now-s.at, s.passed.Load()
	if took < speedOver && s.rate != 0 || took <= 0 {
		return s.rate
	}
	rate := uint64(float64(passed-s.was) / (float64(took) / float64(time.Second)))
	if took >= speedOver {
		s.at, s.was, s.rate = now, passed, rate
	}
	return rate
}
