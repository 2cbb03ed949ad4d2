package pager

import (
	"time"

	"github.com/quarrystore/quarry/internal/uffd"
)

// The faults of a mapping are read by one goroutine at a time, its reader. It serves a fault by itself where that is quick, because to wake another thread for
// each takes longer than the fault. Where more faults wait, or the latest one was not quick, another goroutine goes on reading; where one turns out to be slow, the
// watch of the mapping starts that goroutine. A reader that finds another one in its place ends with its fault.

// maxServers bounds the faults of one mapping that are served at the same time: each thread of the program that waits has one. Further ones wait for one
// of them.
const maxServers = 256

const (
	// quickFault is how long a fault takes at most whose reader also serves the next one.
	quickFault = 30 * time.Microsecond
	// watchEvery is how often the watch looks, and restAfter for how many looks without a fault.
	watchEvery = time.Millisecond
	restAfter  = 20
	// readEvents is how many faults are read at once.
	readEvents = 4
)

// startServing starts what serves the faults of a mapping, until stopFaults.
func (s *Server) startServing(m *mapping) {
	m.watch = make(chan struct{}, 1)
	m.stop = make(chan struct{})
	m.resting.Store(true)
	m.slow.Store(true)
	m.tasks.Go(func() { s.watchReader(m) })
	s.addServer(m, func() { s.readFaults(m, m.reader.Load()) })
}

// addServer runs f as one of the servers.
// Preconditions: the caller is one of m.tasks, or nobody waits for them yet.
func (s *Server) addServer(m *mapping, f func()) {
	m.servers.Add(1)
	m.tasks.Go(func() {
		defer m.servers.Add(-1)
		f()
	})
}

// pass has another goroutine read in place of a reader, if there may be one more.
func (s *Server) pass(m *mapping, reader uint64) bool {
	if m.servers.Load() >= maxServers || !m.reader.CompareAndSwap(reader, reader+1) {
		return false
	}
	m.served.Store(0)
	s.addServer(m, func() { s.readFaults(m, reader+1) })
	return true
}

// readFaults serves faults until another goroutine has become the reader.
func (s *Server) readFaults(m *mapping, reader uint64) {
	var b [readEvents * uffd.EventBytes]byte
	for m.reader.Load() == reader {
		n, err := m.events.Read(b[:])
		if err != nil {
			return
		}
		if several := n > uffd.EventBytes; !several && !m.slow.Load() || !s.pass(m, reader) {
			m.served.Store(reader + 1)
			m.faults.Add(1)
			if m.resting.Load() && m.resting.CompareAndSwap(true, false) {
				m.watch <- struct{}{} // it takes one before it rests again
			}
		}
		for ; n >= 2*uffd.EventBytes; n -= uffd.EventBytes { // those behind the first one
			if e, ok := uffd.Parse(b[n-uffd.EventBytes : n]); ok && m.servers.Load() < maxServers {
				s.addServer(m, func() { s.fault(m, e) })
			} else if ok {
				s.fault(m, e)
			}
		}
		began := time.Now()
		if e, ok := uffd.Parse(b[:n]); ok {
			s.fault(m, e)
		}
		m.slow.Store(time.Since(began) > quickFault)
		m.served.CompareAndSwap(reader+1, 0)
	}
}

// watchReader starts another reader where the reader has served one fault for watchEvery. It rests while there are no faults.
func (s *Server) watchReader(m *mapping) {
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		tick.Stop()
		select {
		case <-m.watch:
		case <-m.stop:
			return
		}
		tick.Reset(watchEvery)
		for last, quiet := m.faults.Load(), 0; quiet < restAfter; {
			select {
			case <-tick.C:
			case <-m.stop:
				return
			}
			busy, now := m.served.Load(), m.faults.Load()
			switch {
			case now != last:
				last, quiet = now, 0
			case busy != 0: // the same fault as a look before
				s.pass(m, busy-1)
			default:
				quiet++
			}
		}
		m.resting.Store(true)
		if m.served.Load() != 0 && m.resting.CompareAndSwap(true, false) {
			m.watch <- struct{}{}
		}
	}
}
