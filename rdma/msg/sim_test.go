package msg_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/msg"
	"github.com/quarrystore/quarry/rdma/sim"
	"github.com/stretchr/testify/require"
)

const (
	session = 7
	region  = 1
)

// heap is memory for a fabric without a device.
type heap struct{}

func (heap) Alloc(n int) ([]byte, error) { return make([]byte, n), nil }

// outcome is what a client was told of a call.
type outcome uint8

const (
	under outcome = iota // under way
	done
	notDone
	unknown
)

// world is one client and one node with its mailbox on the hostile fabric.
type world struct {
	rng      *rand.Rand
	fabric   *sim.Fabric
	node     *sim.Node
	memory   *sim.Memory
	server   *msg.Server // nil: the node does not have the mailbox
	awake    bool        // the node looks by itself
	calm     bool        // no more faults
	cut      bool        // nothing passes
	slow     bool        // the node hardly looks
	serving  bool        // Serve is under way
	executed map[uint64]int
	told     map[uint64]outcome
	settled  map[uint64]int // executed of unknown calls at the first Reset after
	failure  string
	pauses   int
	waits    uint64 // of the node, asleep
	thread   thread // of the node, that sleeps on the client's word
	inThread bool   // the node sleeps in it, if it sleeps
	client   thread // of the client, that sleeps on the node's word
}

// thread is one that sleeps on a word, or is about to.
type thread struct {
	about  bool   // it has looked at the word
	asleep bool   // the kernel has found the word as it was seen
	seen   uint32 // what it saw
	sleeps uint64 // how often it has slept
}

// kernel goes on with a system call that sleeps while the word is what was seen.
func (h *thread) kernel(word uint64) {
	if h.about && !h.asleep {
		h.asleep = uint32(word) == h.seen
		h.about = h.asleep
		if h.asleep {
			h.sleeps++
		}
	}
}

// wake is the system call that wakes a thread which the kernel has put to sleep.
func (h *thread) wake() {
	if h.asleep {
		h.about, h.asleep = false, false
	}
}

// lane is the client's connection, with what the host of a mailbox does at Open, Reset and Wake.
type lane struct {
	*sim.Conn
	w     *world
	epoch uint64
}

func (l *lane) Open(ctx context.Context, number uint32, nonce uint64) (rdma.Window, error) {
	if number != rdma.Mailbox {
		return rdma.Window{}, rdma.ErrKey
	}
	w := l.w
	if w.cut || !w.node.Up {
		return rdma.Window{}, rdma.ErrBroken
	}
	l.epoch++
	w.server = msg.NewServer(&hostile{w}, nonce)
	w.server.WakeBy(w.client.wake)
	w.sleep(false)
	w.memory.Open(l.epoch)
	return l.Conn.Open(ctx, region, l.epoch)
}

func (l *lane) Reset(ctx context.Context) error {
	w := l.w
	_, incarnation := l.Peer()
	if incarnation != w.node.Incarnation && w.node.Up && !w.cut {
		l.Conn.Close()
		c, err := w.fabric.Dial(session, w.node)
		if err != nil {
			return err
		}
		l.Conn = c
	}
	if err := l.Conn.Reset(ctx); err != nil {
		return err
	}
	if w.server != nil {
		w.server.Resume()
		w.sleep(false)
	}
	for id, told := range w.told {
		if _, before := w.settled[id]; told == unknown && !before {
			w.settled[id] = w.executed[id]
		}
	}
	return nil
}

func (l *lane) Wake(*rdma.Window) error {
	if l.w.server != nil {
		l.w.awake, l.w.inThread = true, false
		l.w.server.Wake()
	}
	return nil
}

// Ring is the system call that wakes the node's thread.
func (l *lane) Ring(*rdma.Window, uint64) { l.w.thread.wake() }

// Sleep is the system call by which the client's thread sleeps. Anything may happen before the kernel compares the word.
func (l *lane) Sleep(_ *rdma.Window, off uint64, seen uint32, _ time.Duration) bool {
	w := l.w
	if w.rng.IntN(8) == 0 {
		return false
	}
	w.client = thread{about: true, seen: seen, sleeps: w.client.sleeps}
	for range w.rng.IntN(4) {
		w.yield()
	}
	w.client.kernel(w.memory.Word(off))
	for looks := 0; w.client.asleep && w.failure == ""; looks++ {
		if !w.calm && w.rng.IntN(40) == 0 {
			break // its time is up
		}
		if w.yield(); looks > 20000 {
			w.fail("the client sleeps, and nothing wakes it")
		}
	}
	w.client.about, w.client.asleep = false, false
	return true
}

// sleep has the node sleep, if it may, in a thread or until Wake.
func (w *world) sleep(inThread bool) {
	w.inThread = false
	if w.awake = !w.server.Sleep(inThread); !w.awake && inThread {
		w.doze()
	}
}

// doze has the node's thread look at the client's word. It does once more when it was woken, or the word was another one.
func (w *world) doze() {
	seen, ended := w.server.Rung()
	w.inThread, w.thread = !ended, thread{about: !ended, seen: seen, sleeps: w.thread.sleeps}
	if ended {
		w.awake = true
		w.server.Wake()
	}
}

// hostile is the node's way to the mailbox: verbs run between any two of its accesses.
type hostile struct{ w *world }

func (h *hostile) step() {
	if h.w.rng.IntN(3) == 0 {
		h.w.fabric.StepAny()
	}
}

func (h *hostile) Word(off uint64) uint64 { h.step(); return h.w.memory.Word(off) }
func (h *hostile) Set(off, word uint64)   { h.step(); h.w.memory.Set(off, word) }
func (h *hostile) Load(off uint64, b []byte) {
	h.step()
	h.w.memory.Load(off, b)
}

func (h *hostile) Store(off uint64, b []byte) {
	half := len(b) / 2
	h.w.memory.Store(off+uint64(half), b[half:]) // stores of a processor become visible in their order; pieces show more
	h.step()
	h.w.memory.Store(off, b[:half])
}

// run is the procedure: the answer has the request's number, how often it was executed, and its bytes, inverted.
func (w *world) run(procedure uint16, request, answer []byte) (int, error) {
	if procedure == 9 {
		return 0, msg.ErrProcedure
	}
	id := binary.LittleEndian.Uint64(request)
	w.executed[id]++
	if procedure == 8 {
		return 0, fmt.Errorf("refused %d", id)
	}
	binary.LittleEndian.PutUint64(answer, id)
	binary.LittleEndian.PutUint64(answer[8:], uint64(w.executed[id]))
	for i, b := range request[8:] {
		answer[16+i] = ^b
	}
	return len(request) + 8, nil
}

// yield lets something else happen while the client waits.
func (w *world) yield() {
	if w.failure != "" {
		w.fabric.Choose = func(int) int { return 0 }
	}
	faults := 40
	if w.calm {
		faults = 1
	}
	switch k := w.rng.IntN(400); {
	case k >= faults || w.calm:
		if w.rng.IntN(2) == 0 {
			w.serve()
			return
		}
		if !w.fabric.StepAny() {
			w.serve()
			if w.stuck() {
				w.conn().Break()
			}
		}
	case k < 6:
		w.cut = !w.cut
	case k < 12:
		w.slow = !w.slow
	case k < 25:
		w.conn().Break()
	case k < 26 && w.rng.IntN(8) == 0 && !w.serving:
		w.node.Crash()
		w.node.Start()
		w.server = nil
	}
}

// stuck says that no chain can come to an end: its request or its answer was lost.
func (w *world) stuck() bool { return w.fabric.Ready() == 0 && w.conn().Unanswered() > 0 }

func (w *world) conn() *sim.Conn { return w.fabric.Conn(0) }

// serve is the node's goroutine.
func (w *world) serve() {
	if w.server != nil && !w.awake && w.inThread {
		if w.thread.kernel(w.memory.Word(msg.BellOff)); !w.thread.about {
			w.doze()
		}
	}
	if w.server == nil || !w.awake || w.slow && w.rng.IntN(40) > 0 {
		return
	}
	w.serving = true
	n, err := w.server.Serve(w.run, nil)
	w.serving = false
	if err != nil {
		w.fail("offence of a correct client: %v", err)
	}
	if n == 0 && err == nil && w.rng.IntN(4) == 0 {
		w.sleep(w.rng.IntN(2) == 0)
		w.waits++
	}
}

func (w *world) fail(format string, args ...any) {
	if w.failure == "" {
		w.failure = fmt.Sprintf(format, args...)
	}
}

var errLater = errors.New("no patience")

func (w *world) pause(context.Context, int) error {
	for range 1 + w.rng.IntN(4) {
		w.yield()
	}
	if w.pauses++; w.pauses > 20000 {
		w.fail("no answer, and nothing that could bring it")
	}
	if w.failure != "" || !w.calm && w.rng.IntN(40) == 0 {
		return errLater
	}
	return nil
}

// tally is what the schedules of a test have come through.
type tally struct {
	told            [unknown + 1]uint64
	resets          uint64
	restarts, waits uint64
	// nodeDozes and clientDozes are sleeps of threads.
	nodeDozes, clientDozes uint64
}

// simulate plays one schedule. It returns the promise that was broken.
func simulate(seed uint64, sum *tally) string {
	w := &world{rng: rand.New(rand.NewPCG(seed, 19)), executed: map[uint64]int{}, told: map[uint64]outcome{}, settled: map[uint64]int{}}
	w.fabric = sim.New(w.rng.IntN)
	w.fabric.Grain = []int{8, 64}[w.rng.IntN(2)]
	w.fabric.Yield = w.yield
	w.fabric.Cut = func(uint32, *sim.Node) bool { return w.cut }
	w.node = w.fabric.AddNode()
	w.memory = w.node.AddMemory(region, msg.MailboxBytes, sim.DRAM)
	first, err := w.fabric.Dial(session, w.node)
	if err != nil {
		return err.Error()
	}
	l := &lane{Conn: first, w: w}
	ctx := context.Background()
	c, err := msg.Open(ctx, l, heap{})
	if err != nil {
		return err.Error()
	}
	c.SetPause(w.pause)
	c.SetLooks(w.rng.IntN(6))
	id := uint64(0)
	answer := make([]byte, msg.MaxPayload)
	for range 6 + w.rng.IntN(10) {
		if w.failure != "" {
			return w.failure
		}
		w.pauses = 0
		if w.rng.IntN(6) == 0 && !w.cut {
			if err := c.Reopen(ctx); err != nil && !errors.Is(err, rdma.ErrBroken) {
				return fmt.Sprint("reopen: ", err)
			}
		}
		if w.rng.IntN(3) == 0 {
			w.several(ctx, c, &id)
			continue
		}
		id++
		procedure, request := w.request(id)
		n, err := c.Call(ctx, procedure, request, answer)
		w.judge(id, procedure, request, answer[:n], err)
		if errors.Is(err, rdma.ErrKey) { // the node was restarted
			if err := c.Reopen(ctx); err != nil && !errors.Is(err, rdma.ErrBroken) {
				return fmt.Sprint("reopen after a restart: ", err)
			}
		}
	}
	// At last everything works: the client settles what it does not know, and a call comes through.
	w.calm, w.cut, w.slow, w.pauses = true, false, false, 0
	if err := c.Reset(ctx); err != nil && !errors.Is(err, rdma.ErrKey) {
		return fmt.Sprint("the last reset: ", err)
	}
	if err := c.Reopen(ctx); err != nil {
		return fmt.Sprint("the last reopen: ", err)
	}
	for range 12 {
		id++
		w.pauses = 0
		_, request := w.request(id)
		n, err := c.Call(ctx, 1, request, answer)
		if err != nil {
			w.fail("a call without faults: %v", err)
			break
		}
		w.judge(id, 1, request, answer[:n], err)
	}
	w.check()
	sum.resets += c.Resets
	for _, told := range w.told {
		sum.told[told]++
	}
	sum.restarts += w.node.Incarnation - 1
	sum.waits += w.waits
	sum.nodeDozes += w.thread.sleeps
	sum.clientDozes += w.client.sleeps
	return w.failure
}

// several sends calls before it receives their answers, in any order.
func (w *world) several(ctx context.Context, c *msg.Client, id *uint64) {
	type sent struct {
		id        uint64
		procedure uint16
		request   []byte
		call      msg.Call
	}
	var calls []sent
	for range 1 + w.rng.IntN(msg.Slots+2) {
		*id++
		procedure, request := w.request(*id)
		call, err := c.Send(ctx, procedure, request)
		if err != nil {
			if errors.Is(err, msg.ErrBusy) && len(calls) == 0 && w.calm {
				w.fail("busy without calls")
			}
			w.judge(*id, procedure, request, nil, err)
			break
		}
		calls = append(calls, sent{*id, procedure, request, call})
	}
	w.rng.Shuffle(len(calls), func(i, j int) { calls[i], calls[j] = calls[j], calls[i] })
	answer := make([]byte, msg.MaxPayload)
	for _, s := range calls {
		n, err := c.Receive(ctx, s.call, answer)
		w.judge(s.id, s.procedure, s.request, answer[:n], err)
	}
}

func (w *world) request(id uint64) (procedure uint16, b []byte) {
	b = make([]byte, 8+w.rng.IntN([]int{1, 200, msg.MaxPayload - 15}[w.rng.IntN(3)]))
	binary.LittleEndian.PutUint64(b, id)
	for i := range b[8:] {
		b[8+i] = byte(w.rng.Uint32())
	}
	switch w.rng.IntN(12) {
	case 0:
		return 9, b
	case 1:
		return 8, b
	}
	return 1, b
}

// judge notes what the client was told, and looks whether the answer is that of this request.
func (w *world) judge(id uint64, procedure uint16, request, answer []byte, err error) {
	var refused *msg.Refusal
	switch {
	case err == nil:
		w.told[id] = done
		want := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, id), 1)
		for _, b := range request[8:] {
			want = append(want, ^b)
		}
		if !bytes.Equal(want, answer) || procedure != 1 {
			w.fail("call %d has the answer of another one, or of a second execution", id)
		}
	case errors.As(err, &refused):
		w.told[id] = done
		if refused.Text != fmt.Sprintf("refused %d", id) {
			w.fail("call %d has the refusal %q", id, refused.Text)
		}
	case errors.Is(err, msg.ErrFormat):
		w.fail("call %d: a torn answer: %v", id, err)
	case errors.Is(err, msg.ErrUnknown):
		w.told[id] = unknown
	default:
		w.told[id] = notDone
	}
}

// check compares what was executed with what the client was told.
func (w *world) check() {
	for id, told := range w.told {
		n := w.executed[id]
		switch {
		case n > 1:
			w.fail("call %d was executed %d times", id, n)
		case told == done && n != 1:
			w.fail("call %d was answered, and executed %d times", id, n)
		case told == notDone && n != 0:
			w.fail("call %d was executed, and its client told that it was not", id)
		}
		if before, ok := w.settled[id]; ok && before != n {
			w.fail("call %d was executed after the Reset that had settled it", id)
		}
	}
}

// TestAtMostOnce: whatever is late, lost or doubled, and however often the connection is reset and the node restarted, a
// call is executed once if it was answered, at most once if it is unknown, and never otherwise.
func TestAtMostOnce(t *testing.T) {
	var sum tally
	for seed := range uint64(2000) {
		if broken := simulate(seed, &sum); broken != "" {
			t.Fatalf("seed %d: %s: failed after %d schedules", seed, broken, seed+1)
		}
	}
	t.Logf("%+v", sum)
	for _, n := range []uint64{sum.told[done], sum.told[notDone], sum.told[unknown], sum.resets, sum.restarts, sum.waits, sum.nodeDozes, sum.clientDozes} {
		require.Greater(t, n, uint64(100), "the schedules do not come to what they are about")
	}
}
