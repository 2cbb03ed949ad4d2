package pool

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/client/space"
)

// Times of the protocol. A side that hears nothing for silence ends the stream, so that a pool does not stay open for a program on a host that is lost, or for one that is stopped.
const (
	aliveEvery     = 5 * time.Second
	defaultSilence = 30 * time.Second
)

// Serve is a pool agent: it does what a program on another host asks for on a stream, as a client of its own cluster, and returns when the stream or ctx has ended.
// The program opens at most one pool a stream. If it has not closed that, Serve closes it as Dirty, behind the operations that are running.
func Serve(ctx context.Context, c *client.Client, in io.Reader, out io.Writer) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return serve(ctx, c, in, out, defaultSilence)
}

// agent is the state of Serve.
type agent struct {
	c   *client.Client
	end context.CancelCauseFunc

	writing sync.Mutex
	out     io.Writer

	owning sync.Mutex // held by opOwn

	mu   sync.RWMutex // held for writing by operations that change what is open
	pool *Pool
	seen *space.Space // of a pool that is described
	size uint64       // of that
}

func serve(ctx context.Context, c *client.Client, in io.Reader, out io.Writer, silence time.Duration) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	a := &agent{c: c, end: end, out: out}
	if err := a.write(greeting(streamLanes)); err != nil {
		return err
	}
	quiet := time.AfterFunc(silence, func() { end(fmt.Errorf("%w: the program was silent for %v", errStream, silence)) })
	defer quiet.Stop()
	go func() { end(a.read(ctx, bufio.NewReaderSize(in, 64<<10), func() { quiet.Reset(silence) })) }()
	go func() { end(tellAlive(ctx, a.write)) }()
	<-ctx.Done()
	// Operations that have a.mu end before the pool is closed; others find that ctx has ended.
	a.mu.Lock()
	defer a.mu.Unlock()
	err := context.Cause(ctx)
	if a.pool != nil {
		tidy, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidyTimeout)
		defer cancel()
		a.pool.behind()
		err = errors.Join(err, a.pool.Close(tidy))
	}
	if errors.Is(err, io.EOF) {
		err = nil // and io.ErrUnexpectedEOF stays
	}
	return err
}

// errStream: the other side of a stream does not do what the protocol says.
var errStream = errors.New("the stream of a pool agent has ended")

// tellAlive writes frames by which the other side knows that this one is there.
func tellAlive(ctx context.Context, write func([]byte) error) error {
	alive := time.NewTicker(aliveEvery)
	defer alive.Stop()
	for {
		select {
		case <-alive.C:
			if err := write(appendFrame(nil, frameAlive, 0, 0)); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// read runs requests until the stream ends.
func (a *agent) read(ctx context.Context, in io.Reader, heard func()) error {
	version, _, err := readGreeting(in)
	if err == nil && version != agentVersion {
		err = fmt.Errorf("the program on the other side speaks version %d of the protocol of pool agents, and this quarry %d: install the same version of Quarry on both sides", version, agentVersion)
	}
	if err != nil {
		return err
	}
	buffers := make(chan []byte, streamLanes)
	for range streamLanes {
		buffers <- nil
	}
	for {
		var b []byte
		select {
		case b = <-buffers:
		case <-ctx.Done():
			return nil
		}
		if b == nil {
			b = make([]byte, frameBytes+maxBody)
		}
		f, err := readFrame(in, b[frameBytes:])
		if err == nil && f.kind >= frameDone && f.kind != frameAlive {
			err = fmt.Errorf("%w: an answer where a request is wanted", errFrame)
		}
		if err != nil {
			if errors.Is(err, errFrame) {
				_ = a.fail(0, err) // the stream ends anyway
			}
			return err
		}
		heard()
		if f.kind == frameAlive {
			buffers <- b
			continue
		}
		go func() {
			if err := a.run(ctx, f, b); err != nil {
				a.end(err)
			}
			buffers <- b
		}()
	}
}

func (a *agent) write(b []byte) error {
	a.writing.Lock()
	defer a.writing.Unlock()
	_, err := a.out.Write(b)
	return err
}

func (a *agent) fail(id uint64, err error) error {
	body := encodeError(err)
	return a.write(append(appendFrame(nil, frameFailed, id, len(body)), body...))
}

// run does a request and answers it. b has the request, and is used for the answer. An error ends the stream.
func (a *agent) run(ctx context.Context, f frame, b []byte) error {
	answer := b[:frameBytes]
	var err error
	if isControl(f.kind) {
		var c control
		if c, err = a.control(ctx, f); err == nil && c.Info != nil {
			answer = append(answer, c.encode()...)
		}
	} else {
		answer, err = a.data(ctx, f, answer)
	}
	if err != nil {
		return a.fail(f.id, err)
	}
	appendFrame(b[:0], frameDone, f.id, len(answer)-frameBytes)
	return a.write(answer)
}

// control does an operation that is not about a range.
func (a *agent) control(ctx context.Context, f frame) (answer control, err error) {
	c, err := decodeControl(f.body)
	if err != nil {
		return answer, err
	}
	if len(c.Token) > len(token{}) {
		return answer, fmt.Errorf("%w: a token of %d bytes", client.ErrArgument, len(c.Token))
	}
	if f.kind == opOwn {
		return answer, a.own(ctx, c)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return answer, err
	}
	free := f.kind == opCreate || f.kind == opOpen || f.kind == opLook || f.kind == opRemove
	switch {
	case free && a.pool != nil:
		return answer, fmt.Errorf("%w: an agent opens one pool a stream, and has %q", client.ErrArgument, a.pool.name)
	case !free && a.pool == nil:
		return answer, ErrClosed
	}
	switch f.kind {
	case opCreate, opOpen:
		return a.open(ctx, f.kind, c)
	case opLook:
		return a.look(ctx, c.Name)
	case opRemove:
		return answer, Remove(ctx, a.c, c.Name)
	case opClose:
		return answer, a.close(ctx, c.Dirty)
	}
	attr, err := c.attr()
	if err != nil {
		return answer, err
	}
	return answer, a.pool.SetAttr(attr)
}

// own changes the pool's last owner. It does not wait for operations on ranges, of which one may have failed while others go on: their program wants the pool torn.
func (a *agent) own(ctx context.Context, c control) error {
	a.mu.RLock()
	defer a.mu.RUnlock()
	a.owning.Lock()
	defer a.owning.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	if a.pool == nil {
		return ErrClosed
	}
	return a.pool.own(ctx, c.Token, c.Torn)
}

// open creates or opens a pool.
func (a *agent) open(ctx context.Context, op byte, c control) (control, error) {
	var attr *Attr
	if c.Attr != nil || op == opCreate {
		at, err := c.attr()
		if err != nil {
			return control{}, err
		}
		attr = &at
	}
	var p *Pool
	var err error
	if op == opCreate {
		if c.Token == "" {
			c.Token = newToken()
		}
		p, err = create(ctx, a.c, c.Name, nil, c.Bytes, Options{Attr: *attr, Replicas: c.Replicas, RegionBytes: c.RegionBytes, Durable: c.Durable}, c.Token, c.Torn)
	} else {
		if c.Bare {
			c.Bytes = anySize
		}
		p, err = open(ctx, a.c, c.Name, nil, c.Bytes, attr, c.Keep)
	}
	if err != nil {
		return control{}, err
	}
	a.pool = p
	s := p.s.Info()
	i := &Info{Name: c.Name, State: Ready, Bytes: p.size, Replicas: s.Replicas, Durable: s.Durable, Dirty: p.Dirty(), Torn: p.torn(), Space: s.Name}
	return control{Attr: encodeAttr(p.Attr()), Token: p.owner(), Info: i}, nil
}

// look describes a pool, which may be open, and has its replicas compared by opCompare.
func (a *agent) look(ctx context.Context, name string) (control, error) {
	i, err := Stat(ctx, a.c, name)
	if err != nil {
		return control{}, err
	}
	a.seen = nil
	if i.State == Ready {
		if a.seen, err = space.Open(ctx, a.c, i.Space); err != nil {
			return control{}, err
		}
		a.size = i.Bytes
	}
	return control{Attr: encodeAttr(i.Attr), Info: &i}, nil
}

// close closes the pool. The program knows best whether it lacks something.
func (a *agent) close(ctx context.Context, dirty bool) error {
	if dirty {
		a.pool.behind()
	} else {
		a.pool.clean.Store(a.pool.failed.Load())
	}
	if err := a.pool.Close(ctx); err != nil {
		return err
	}
	a.pool = nil
	return nil
}

// data does an operation on a range, and appends the body of its answer.
func (a *agent) data(ctx context.Context, f frame, answer []byte) ([]byte, error) {
	off, n, count, data, err := f.span()
	if err != nil {
		return nil, err
	}
	a.mu.RLock()
	defer a.mu.RUnlock()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	p := a.pool
	if f.kind == opCompare && p == nil && a.seen != nil {
		return compareParts(ctx, comparerOf(a.seen), off, n, count, a.size, answer)
	}
	if p == nil {
		return nil, ErrClosed
	}
	whole := n
	if f.kind == opCompare {
		whole = n * count
	}
	if err := p.enter(off, whole); err != nil {
		return nil, err
	}
	defer p.mu.RUnlock()
	switch f.kind {
	case opPersist:
		return answer, p.write(p.claim.bound, data, off)
	case opDeepPersist:
		return answer, p.deepPut(data, off)
	case opRead:
		_, err := p.s.Read(p.claim.bound, answer[len(answer):][:n], p.base+off)
		return answer[:len(answer)+int(n)], p.claim.because(err)
	case opCompare:
		answer, err := compareParts(p.claim.bound, comparerOf(p.s), off, n, count, p.size, answer)
		return answer, p.claim.because(err)
	}
	return answer, p.claim.because(p.s.Flush(p.claim.bound, p.base+off, n))
}

// compareParts appends the hashes of parts.
func compareParts(ctx context.Context, ask comparer, off, n, count, size uint64, answer []byte) ([]byte, error) {
	if err := inRange(off, n*count, size, ""); err != nil {
		return nil, err
	}
	var hashes [parts]uint64
	var alike [parts]bool
	if err := ask(ctx, off, n, hashes[:count], alike[:count]); err != nil {
		return nil, err
	}
	for i := range count {
		answer = appendHash(answer, hashes[i], alike[i])
	}
	return answer, nil
}
