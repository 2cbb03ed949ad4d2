package pager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
	"github.com/quarrystore/quarry/internal/latency"
	"github.com/quarrystore/quarry/internal/pagerlink"
)

// Limits of a Config.
const (
	MinMemory    = 1 << 20
	MaxReadAhead = 2 << 20
	maxMappings  = 1024
)

// Config of a pager. Client and Guard are needed.
type Config struct {
	Client       *client.Client // with its rights, in its tenant
	Memory       uint64         // bytes of pages in memory; default 256 MiB
	ReadAhead    uint64         // most bytes that one fault reads; default MaxReadAhead
	FaultTimeout time.Duration  // bounds the wait of a fault, a write-back and a call; default 30 s
	Idle         time.Duration  // Serve ends when nothing has been mapped for so long; 0: never
	Guard        []string       // command that runs RunGuard
	Logger       *slog.Logger   // default slog.Default()
}

// Server is a pager.
type Server struct {
	cfg     Config
	cache   *cache
	guard   *guard
	count   counts
	latency latency.Histogram
	buffers sync.Pool // of *[]byte with MaxReadAhead bytes, for fills

	mu       sync.Mutex         // guards what follows
	memories map[string]*memory // by space
	serial   uint64             // of the newest memory and mapping
	links    map[*pagerlink.Conn]bool
	idle     time.Time // since when nothing is mapped
}

// New checks a Config and starts the guard.
func New(cfg Config) (*Server, error) {
	if cfg.Memory == 0 {
		cfg.Memory = 256 << 20
	}
	if cfg.ReadAhead == 0 {
		cfg.ReadAhead = MaxReadAhead
	}
	if cfg.FaultTimeout == 0 {
		cfg.FaultTimeout = 30 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	switch {
	case cfg.Memory < MinMemory || cfg.Memory > 1<<46:
		return nil, fmt.Errorf("%w: memory of %d bytes: want %d bytes (1 MiB) or more", client.ErrArgument, cfg.Memory, MinMemory)
	case cfg.ReadAhead < pageBytes || cfg.ReadAhead > MaxReadAhead:
		return nil, fmt.Errorf("%w: read-ahead of %d bytes: want %d to %d", client.ErrArgument, cfg.ReadAhead, pageBytes, MaxReadAhead)
	case cfg.FaultTimeout < 0 || cfg.Idle < 0:
		return nil, fmt.Errorf("%w: a negative time", client.ErrArgument)
	}
	g, err := startGuard(cfg.Guard)
	if err != nil {
		return nil, err
	}
	return &Server{cfg: cfg, cache: newCache(int(cfg.Memory / pageBytes)), guard: g, memories: map[string]*memory{},
		links: map[*pagerlink.Conn]bool{}, idle: time.Now(), buffers: sync.Pool{New: func() any {
			b := make([]byte, MaxReadAhead)
			return &b
		}}}, nil
}

// ErrGuard: the guard has ended, so that programs would wait for ever if the pager ended, too.
var ErrGuard = errors.New("the pager's guard process has ended")

// Serve serves programs until the context ends, or the pager has been idle. Then it ends all mappings, writes what is dirty back and ends: programs whose
// threads wait for a page, or touch one later, get SIGBUS. An error: what could not be written, or ErrGuard. The caller closes the listener behind it, so that
// no other pager reads pages that this one has not written yet.
func (s *Server) Serve(ctx context.Context, l *pagerlink.Listener) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var tasks sync.WaitGroup
	tasks.Go(func() {
		defer cancel(nil)
		s.clean(ctx)
	})
	tasks.Go(func() {
		select {
		case <-s.guard.ended:
			cancel(ErrGuard)
		case <-ctx.Done():
		}
		l.Stop()
		s.endLinks()
	})
	var programs sync.WaitGroup
	for {
		link, err := l.Accept()
		if err != nil {
			if ctx.Err() == nil {
				cancel(err)
			}
			break
		}
		if !s.admit(ctx, link) {
			link.Close()
			continue
		}
		programs.Go(func() {
			s.program(ctx, link)
			s.mu.Lock()
			delete(s.links, link)
			s.mu.Unlock()
			link.Close()
		})
	}
	tasks.Wait()
	programs.Wait()
	err := s.end()
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		err = errors.Join(cause, err)
	}
	return err
}

// admit says whether there is room for one more program.
func (s *Server) admit(ctx context.Context, link *pagerlink.Conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ctx.Err() != nil {
		return false
	}
	if len(s.links) >= maxMappings {
		_ = link.Send(pagerlink.Reply{Error: fmt.Sprintf("the pager serves %d mappings, which is the limit", maxMappings)})
		return false
	}
	s.links[link] = true
	return true
}

// lastReplies bounds the wait for programs to read the replies to their last calls, when the pager ends.
const lastReplies = 5 * time.Second

// endLinks ends all mappings: see program. A program that reads no replies does not keep the pager from writing back.
func (s *Server) endLinks() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for link := range s.links {
		_ = link.SetReadDeadline(time.Unix(1, 0))
		_ = link.SetWriteDeadline(time.Now().Add(lastReplies))
	}
}

// end has programs that touch their mappings get SIGBUS. No mapping is left, so what is dirty could not be written.
func (s *Server) end() error {
	ctx, cancel := s.faultContext()
	defer cancel()
	var errs []error
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range s.memories {
		errs = append(errs, s.sync(ctx, m, 0, m.pages()))
	}
	s.guard.close()
	return errors.Join(errs...)
}

// cleanEvery is how often memories that no program maps are looked at.
const cleanEvery = time.Second

// clean ends the memories of spaces that no program maps any more, when their dirty pages are written. It returns when the pager has been idle.
func (s *Server) clean(ctx context.Context) {
	tick := time.NewTicker(cleanEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		s.mu.Lock()
		var unused []*memory
		for _, m := range s.memories {
			if m.users == 0 {
				unused = append(unused, m)
			}
		}
		if len(s.links) > 0 || len(s.memories) > 0 {
			s.idle = time.Now()
		}
		over := s.cfg.Idle > 0 && time.Since(s.idle) > s.cfg.Idle
		s.mu.Unlock()
		if over {
			s.cfg.Logger.Info("the pager ends: nothing is mapped", "since", s.idle)
			return
		}
		for _, m := range unused {
			s.finish(ctx, m)
		}
	}
}

// enter finds the memory of a space, or makes it.
func (s *Server) enter(ctx context.Context, q *pagerlink.Request) (*memory, error) {
	want := space.Identity{Cluster: q.Cluster, Tenant: q.Tenant, Name: q.Space, Base: q.Base, Region: q.Region}
	c := s.cfg.Client
	if c.Cluster() != want.Cluster {
		return nil, fmt.Errorf("%w: this pager serves another cluster than that of the space: start another one with --socket", client.ErrArgument)
	}
	if c.Tenant() != want.Tenant {
		return nil, fmt.Errorf("%w: this pager works in tenant %d, the space is in tenant %d: start another one with --tenant and --socket", client.ErrArgument, c.Tenant(), want.Tenant)
	}
	sp, err := space.Open(ctx, c, want.Name)
	if err != nil {
		return nil, err
	}
	if id := sp.Identity(); id != want {
		return nil, fmt.Errorf("%w: space %q was deleted and made again: open it again", client.ErrArgument, want.Name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.memories[want.Name]
	if m != nil && m.id != want {
		return nil, fmt.Errorf("%w: programs of this host still map the space %q that was deleted: end them first", client.ErrArgument, want.Name)
	}
	if m == nil {
		s.serial++
		if m, err = newMemory(sp, s.serial); err != nil {
			return nil, err
		}
		s.memories[want.Name] = m
	}
	if err := m.grow(sp.Bytes()); err != nil {
		return nil, err
	}
	m.users++
	return m, nil
}

// leave is behind the end of a mapping's connection, when nothing of it works on the memory any more.
func (s *Server) leave(ctx context.Context, m *memory) {
	s.mu.Lock()
	m.users--
	last := m.users == 0
	s.mu.Unlock()
	if last {
		s.finish(ctx, m)
	}
}

// finish ends a memory that no program maps, when its dirty pages are written, or can never be because the space was deleted.
func (s *Server) finish(ctx context.Context, m *memory) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.FaultTimeout)
	defer cancel()
	gone := false
	if err := s.sync(ctx, m, 0, m.pages()); err != nil {
		gone = m.deleted(ctx)
		s.keeps(m, gone, err)
		if !gone {
			s.dropLost(ctx, m)
			return
		}
	}
	s.empty(m, 0, m.pages(), gone)
	s.mu.Lock()
	defer s.mu.Unlock()
	if m.users == 0 && s.memories[m.id.Name] == m && s.cache.count(m) == 0 {
		delete(s.memories, m.id.Name)
		m.close()
	}
}

// deleted says whether the space is there no more. A space of which a region was lost is there.
func (m *memory) deleted(ctx context.Context) bool {
	_, err := m.space.Resolve(ctx, m.base())
	return errors.Is(err, client.ErrNoName)
}

// keeps says, once for each memory, what becomes of pages that could not be written.
func (s *Server) keeps(m *memory, gone bool, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case gone:
		s.cfg.Logger.Warn("the space was deleted: stores into it are dropped", "space", m.id.Name)
	case !m.kept:
		m.kept = true
		s.cfg.Logger.Warn("dirty pages are kept until they can be written", "space", m.id.Name, "reason", err)
	}
}

// dropLost removes the dirty pages of regions that were lost for good: they can never be written.
func (s *Server) dropLost(ctx context.Context, m *memory) {
	each, next := m.space.Info().RegionBytes/pageBytes, uint64(0)
	for _, page := range s.cache.within(m, 0, m.pages(), func(f *frame) bool { return f.dirty }) {
		if page < next { // of the same region
			continue
		}
		first := page / each * each
		next = first + each
		if _, err := m.space.Resolve(ctx, m.address(page)); errors.Is(err, space.ErrLost) {
			s.cfg.Logger.Warn("a region of the space was lost: stores into it are dropped", "space", m.id.Name, "address", m.address(first))
			s.empty(m, first, each, true)
		}
	}
}

// empty removes pages of a memory, but for dirty ones unless those are of no use.
func (s *Server) empty(m *memory, first, n uint64, dirty bool) {
	until := time.Now().Add(s.cfg.FaultTimeout)
	for _, page := range s.cache.within(m, first, n, func(f *frame) bool { return dirty || !f.dirty }) {
		f, err := s.cache.take(m, page, until)
		switch {
		case err != nil: // later
			return
		case f == nil:
		case !dirty && s.isDirty(f): // of a program that has come meanwhile
			s.cache.release(f)
		default:
			if s.forget(run{f}) != nil {
				return // the others too
			}
		}
	}
}
