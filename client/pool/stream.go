package pool

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/client"
)

// Host is a machine that reaches another cluster, and on which the program quarry is: Host runs it there by ssh, as a pool agent.
type Host struct {
	// Name is what ssh connects to: HOST, USER@HOST, or a name of its configuration.
	Name string
	// SSH is the command that runs another one on a host, without the host, cut at spaces. "": that of the variable QUARRY_SSH, or else DefaultSSH.
	SSH string
	// Agent is the command on the host, for its shell. "": that of the variable QUARRY_POOL_AGENT, or else DefaultAgent.
	Agent string
}

// Defaults of Host. DefaultSSH asks nothing at a terminal, and notices a host that is lost.
const (
	DefaultSSH   = "ssh -T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
	DefaultAgent = "quarry pool-agent"
)

// MaxHostBytes is how long the name of a Host can be.
const MaxHostBytes = 255

// check refuses names that ssh would take for something else.
func (h Host) check() error {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-@:%[]"
	if h.Name == "" || len(h.Name) > MaxHostBytes || h.Name[0] == '-' || strings.Trim(h.Name, plain) != "" || h.Name[0] == '@' || strings.HasSuffix(h.Name, "@") {
		return fmt.Errorf("%w: host %.80q: want HOST or USER@HOST, of letters, digits and ._-:%%[]", client.ErrArgument, h.Name)
	}
	return nil
}

// ssh is the command of the host.
func (h Host) ssh() []string {
	return strings.Fields(cmp.Or(strings.TrimSpace(h.SSH), strings.TrimSpace(os.Getenv("QUARRY_SSH")), DefaultSSH))
}

func (h Host) agent() string { return cmp.Or(h.Agent, os.Getenv("QUARRY_POOL_AGENT"), DefaultAgent) }

// stream is a running agent. Safe for concurrent use.
type stream struct {
	host    string
	agent   string // the command there
	cmd     *exec.Cmd
	in      io.WriteCloser
	said    tail // standard error of cmd
	silence time.Duration
	lanes   chan struct{}
	gone    chan struct{} // closed when the process has ended

	writing sync.Mutex // guards the order of bytes in in

	mu    sync.Mutex
	id    uint64
	calls map[uint64]*remoteCall
	err   error         // why no call is answered any more
	ended chan struct{} // closed when err is set
}

// remoteCall is a request that has no answer yet.
type remoteCall struct {
	body   []byte // of the answer, which has as many bytes, or, if take is set, any number
	take   bool
	answer chan error
}

// dial starts an agent. ctx bounds the start.
func (h Host) dial(ctx context.Context) (*stream, error) { return h.dialWith(ctx, defaultSilence) }

func (h Host) dialWith(ctx context.Context, silence time.Duration) (*stream, error) {
	if err := errors.Join(ctx.Err(), h.check()); err != nil {
		return nil, err
	}
	words := append(h.ssh(), h.Name, h.agent())
	s := &stream{host: h.Name, agent: h.agent(), silence: silence, lanes: make(chan struct{}, streamLanes), calls: map[uint64]*remoteCall{}, ended: make(chan struct{}), gone: make(chan struct{})}
	s.cmd = exec.Command(words[0], words[1:]...)
	s.cmd.Stderr, s.cmd.WaitDelay = &s.said, endTimeout
	var err error
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%w: %s: %w: install OpenSSH's client (openssh-client), or name another command by QUARRY_SSH", ErrAgent, words[0], err)
	}
	greeted := make(chan struct{})
	go s.read(bufio.NewReaderSize(out, 64<<10), greeted)
	if err := s.write(greeting(0), nil); err == nil {
		go s.tellAlive()
	}
	select {
	case <-greeted:
		return s, nil
	case <-s.ended:
	case <-ctx.Done():
		s.fail(ctx.Err())
	}
	return nil, s.why()
}

// endTimeout bounds the wait for a process whose stream has ended.
const endTimeout = 5 * time.Second

// why is the error of calls that have not been sent.
func (s *stream) why() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Errorf("%w on %s: %w", ErrAgent, s.host, s.err)
}

// tellAlive has the agent know that this program goes on.
func (s *stream) tellAlive() {
	t := time.NewTicker(aliveEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			if s.write(appendFrame(nil, frameAlive, 0, 0), nil) != nil {
				return
			}
		case <-s.ended:
			return
		}
	}
}

// fail ends the stream. All calls that wait for an answer end, and the process is told to.
func (s *stream) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return
	}
	s.err = err
	close(s.ended)
	for id, c := range s.calls {
		delete(s.calls, id)
		c.answer <- errStream
	}
	go s.stop()
}

// stop ends the process: by the end of its standard input, by a signal, and at last by force.
func (s *stream) stop() {
	_ = s.in.Close()
	for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		select {
		case <-s.gone:
			return
		case <-time.After(endTimeout):
			_ = s.cmd.Process.Signal(signal)
		}
	}
}

// close ends the stream in order and waits for the process.
func (s *stream) close() {
	s.fail(ErrClosed)
	<-s.gone
}

// read takes answers until the stream ends, and waits for the process then.
func (s *stream) read(out io.Reader, greeted chan<- struct{}) {
	quiet := time.AfterFunc(s.silence, func() { s.fail(fmt.Errorf("no word from it for %v", s.silence)) })
	err := s.answers(out, greeted, func() { quiet.Reset(s.silence) })
	quiet.Stop()
	if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		s.fail(err) // before the process ends, which may take a while
	}
	_ = s.in.Close()
	force := time.AfterFunc(endTimeout, func() { _ = s.cmd.Process.Kill() })
	_, _ = io.Copy(io.Discard, out) // until the process has ended, or is killed
	werr := s.cmd.Wait()
	force.Stop()
	close(s.gone)
	s.fail(s.epitaph(werr))
}

// answers gives answers to the calls that wait for them.
func (s *stream) answers(out io.Reader, greeted chan<- struct{}, heard func()) error {
	version, _, err := readGreeting(out)
	if errors.Is(err, errFrame) {
		err = fmt.Errorf("%w: the command there, or a start file of its shell, writes to standard output", err)
	} else if err == nil && version != agentVersion {
		err = fmt.Errorf("its quarry speaks version %d of the protocol of pool agents, and this program %d: install the same version of Quarry on both sides", version, agentVersion)
	}
	if err != nil {
		return err
	}
	heard()
	close(greeted)
	var head [frameBytes]byte
	buf := make([]byte, 8+maxErrorText+maxControl)
	for {
		if _, err := io.ReadFull(out, head[:]); err != nil {
			return err
		}
		heard()
		if err := s.answer(out, head[:], buf); err != nil {
			return err
		}
	}
}

// answer takes one frame. buf has room for a body that is not what a call has asked for.
func (s *stream) answer(out io.Reader, head, buf []byte) error {
	f, n := headOf(head)
	if f.kind == frameAlive && n == 0 {
		return nil
	}
	s.mu.Lock()
	c := s.calls[f.id]
	delete(s.calls, f.id)
	s.mu.Unlock()
	end := func(err error) error { // the call ends in any case
		if c != nil {
			c.answer <- err
		}
		return err
	}
	if f.kind == frameDone && c != nil && (n == len(c.body) || c.take && n <= maxControl) {
		if c.take {
			c.body = make([]byte, n)
		}
		if _, err := io.ReadFull(out, c.body); err != nil {
			_ = end(errStream)
			return err
		}
		_ = end(nil)
		return nil
	}
	if f.kind != frameFailed || n > len(buf) || c == nil && f.id != 0 {
		_ = end(errStream)
		return fmt.Errorf("%w: kind %d with %d bytes", errFrame, f.kind, n)
	}
	_, err := io.ReadFull(out, buf[:n])
	if err == nil {
		err = decodeError(buf[:n])
	}
	if is := (*remoteError)(nil); c == nil || !errors.As(err, &is) {
		_ = end(errStream)
		return err
	}
	_ = end(err)
	return nil
}

// epitaph says why the process has ended.
func (s *stream) epitaph(err error) error {
	exit := -1
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		exit = e.ExitCode()
	}
	words := s.said.String()
	switch {
	case exit == 126 || exit == 127:
		return fmt.Errorf("its shell cannot run %s: install Quarry there, or name its path by QUARRY_POOL_AGENT: %s", s.agent, words)
	case exit == 255:
		return fmt.Errorf("%s could not connect, or lost its connection: %s", s.cmd.Args[0], cmp.Or(words, "it says nothing"))
	case err != nil:
		return fmt.Errorf("the agent has ended: %w: %s", err, words)
	}
	return fmt.Errorf("the agent has ended: %s", cmp.Or(words, "it says nothing"))
}

// write writes a frame's header and body.
func (s *stream) write(head, body []byte) error {
	s.writing.Lock()
	defer s.writing.Unlock()
	_, err := s.in.Write(head)
	if err == nil && len(body) > 0 {
		_, err = s.in.Write(body)
	}
	return err
}

// do makes a call. The answer has as many bytes as answer, and is stored there.
func (s *stream) do(ctx context.Context, op byte, words []uint64, data, answer []byte) error {
	head := make([]byte, 0, frameBytes+8*len(words))
	head = appendWords(head[:frameBytes], words...)
	return s.send(ctx, op, head, data, &remoteCall{body: answer, answer: make(chan error, 1)})
}

// control makes a call that is not about a range.
func (s *stream) control(ctx context.Context, op byte, c control) (control, error) {
	call := &remoteCall{take: true, answer: make(chan error, 1)}
	if err := s.send(ctx, op, make([]byte, frameBytes), c.encode(), call); err != nil {
		return control{}, err
	}
	c, err := decodeControl(call.body)
	if err != nil {
		s.fail(err)
		err = s.lost(op)
	}
	return c, err
}

// send sends a frame, whose header begins head, and waits for its answer. If ctx ends before that, the stream ends: a call that nobody waits for could change bytes later.
//
// Errors: client.ErrUnknown: the stream has ended meanwhile; ErrAgent: it had before, or op changes nothing; others are the agent's.
func (s *stream) send(ctx context.Context, op byte, head, data []byte, c *remoteCall) error {
	select {
	case s.lanes <- struct{}{}:
		defer func() { <-s.lanes }()
	case <-s.ended:
		return s.why()
	case <-ctx.Done():
		return ctx.Err()
	}
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return s.why()
	}
	s.id++
	id := s.id
	s.calls[id] = c
	s.mu.Unlock()
	if ctx.Done() != nil {
		defer context.AfterFunc(ctx, func() { s.fail(ctx.Err()) })()
	}
	appendFrame(head[:0], op, id, len(head)-frameBytes+len(data))
	_ = s.write(head, data) // if it fails, the stream has ended or is about to
	err := <-c.answer
	switch {
	case errors.Is(err, errStream):
		<-s.ended
		return s.lost(op)
	case err != nil:
		return fmt.Errorf("%s: %w", s.host, err)
	}
	return nil
}

// lost is the error of a call that was not answered.
func (s *stream) lost(op byte) error {
	if changes(op) {
		return fmt.Errorf("%w: %w", client.ErrUnknown, s.why())
	}
	return s.why()
}

// tail keeps the last of what is written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

const maxTail = 2 << 10

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, b[max(0, len(b)-maxTail):]...)
	t.b = t.b[max(0, len(t.b)-maxTail):]
	return len(b), nil
}

// String is what was written, as one line.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(strings.Fields(strings.ToValidUTF8(string(t.b), "?")), " ")
}
