package cxl

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"

	"github.com/quarrystore/quarry/internal/keyring"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/rdma/shm"
)

// AgentConfig says for which host an agent runs.
type AgentConfig struct {
	Host   string // name of this host: no other host has it
	BootID string // as clients compare it with theirs
	// MachineID identifies the machine and survives restarts (machine-id(5)). Empty: not known; then no agent takes over a slot of an earlier boot.
	MachineID string
	Socket    string // path at which clients of this host find it
	Limits    host.Limits
	Log       *slog.Logger
	// Prepare is called with the access control of each incarnation of the node that the host serves, before it is served; may be nil.
	Prepare func(*host.Access)
}

// Agent gives the regions of a shared device to the clients of its host, as the home has it, and takes them back.
type Agent struct {
	cfg  AgentConfig
	dev  *pmem.Device
	area pmem.Mapping
	b    board
	slot board
	run  uint64

	keys    *keyring.Ring
	whole   *host.Memory // stands for the device: what a client that was sent it may write
	serving *serving     // nil: no incarnation of the home is served
	acked   uint64
	before  func() bool // of tests: called before each look at the board; false: the agent dies
	during  func()      // of tests: called in each command
}

// serving is the service of one incarnation of the home.
type serving struct {
	cluster     [16]byte
	node        uint64
	incarnation uint64
	access      *host.Access
	server      *shm.Server
	regions     map[uint32]*part
}

// part is a region's memory, and where it lies.
type part struct {
	memory     *host.Memory
	off, bytes uint64
}

const (
	// agentEvery is how often an agent looks at the board while nothing happens, and eagerFor how long it looks without a pause behind a command.
	agentEvery = 5 * time.Millisecond
	eagerFor   = 2 * time.Millisecond
	// commandLimit bounds one try to carry out a command.
	commandLimit = 10 * time.Second
)

// ErrRefused means that the home did not let this host in.
var ErrRefused = errors.New("the storage node has not let this host in: its log says why")

// NewAgent asks to join the hosts of a device, and runs the litmus with the home, until ctx ends.
// Preconditions: dev is locked: no process of this host that was sent the device by an earlier agent has it still.
func NewAgent(ctx context.Context, dev *pmem.Device, cfg AgentConfig) (_ *Agent, err error) {
	if err := checkHost(cfg.Host); err != nil {
		return nil, err
	}
	if len(cfg.Socket) > maxSocket-8 || len(cfg.BootID) > maxText-8 || len(cfg.MachineID) > maxText-8 {
		return nil, fmt.Errorf("socket %q: want a path of at most %d bytes", cfg.Socket, maxSocket-8)
	}
	a := &Agent{cfg: cfg, dev: dev, keys: &keyring.Ring{}}
	if a.area, a.b, err = mapBoard(dev); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s: %w", dev.Path, err), a.area.Unmap())
		}
	}()
	if err = a.awaitBoard(ctx); err != nil {
		return nil, err
	}
	if had := a.b.text(atHomeHost, maxText); had == cfg.Host {
		return nil, fmt.Errorf("the storage node itself runs on host %s: its clients there need no other agent", had)
	}
	all := func([]byte) (uint64, error) { return dev.Align, nil }
	if a.whole, err = host.OpenDeviceMemory(dev, dev.Path, 0, dev.Align, all); err != nil {
		return nil, err
	}
	if err = a.join(ctx); err != nil {
		return nil, errors.Join(err, a.whole.Close())
	}
	return a, nil
}

// awaitBoard waits until the storage node has made the board.
func (a *Agent) awaitBoard(ctx context.Context) error {
	for {
		err := a.b.check()
		if !errors.Is(err, errNoBoard) || pause(ctx, agentEvery) != nil {
			return err
		}
	}
}

// claim finds the slot of this host: the one with its name, or a free one.
// Invariant: an agent takes a slot over only where it has shown that the former agent and its clients are gone: by the device's lock, which it holds, if
// that agent ran under this kernel; by the end of the earlier kernel, if that agent ran on this machine before a restart. An agent cannot show this for
// another machine with the same name, and is refused.
func (a *Agent) claim(ctx context.Context) error {
	free := -1
	for i := range MaxHosts {
		s := a.b.slot(i)
		switch state := s.load(atState); {
		case state != stateFree && state != stateMaking && s.text(atName, maxText) == a.cfg.Host:
			a.slot = s
			return a.succeed(ctx)
		case state == stateFree && free < 0:
			free = i
		}
	}
	if free < 0 {
		return fmt.Errorf("%d hosts have the device already", MaxHosts)
	}
	if a.slot = a.b.slot(free); !a.slot.cas(atState, stateFree, stateMaking) {
		return errors.New("another host has joined at the same moment: start this agent again")
	}
	return nil
}

// livesFor is how long the beat of an agent of an earlier boot must not change before another agent takes its slot. It detects two running machines with
// one machine id.
const livesFor = time.Second

// succeed refuses to take over the slot of an agent that may run on another machine.
func (a *Agent) succeed(ctx context.Context) error {
	if a.slot.text(atBootID, maxText) == a.cfg.BootID {
		return nil
	}
	if machine := a.slot.text(atMachine, maxText); machine == "" || machine != a.cfg.MachineID {
		return fmt.Errorf("a host named %s has the device, and nothing shows that it was this machine: give this one another name (--host), or, if that host is off for good, restart the storage node with --host-gone %[1]s", a.cfg.Host)
	}
	beat := a.slot.load(atBeat)
	if err := pause(ctx, livesFor); err != nil {
		return err
	}
	if a.slot.load(atBeat) != beat {
		return fmt.Errorf("another host named %s, with the machine id of this one, has the device: give this one another name (--host), and an id of its own", a.cfg.Host)
	}
	return nil
}

// join asks the home, and waits for its verdict.
func (a *Agent) join(ctx context.Context) error {
	if err := a.claim(ctx); err != nil {
		return err
	}
	var b [8]byte
	rand.Read(b[:])
	a.run = binary.LittleEndian.Uint64(b[:]) | 1
	s := a.slot
	s.put(atName, maxText, a.cfg.Host)
	s.put(atBootID, maxText, a.cfg.BootID)
	s.put(atMachine, maxText, a.cfg.MachineID)
	s.put(atSocket, maxSocket, a.cfg.Socket)
	s.put(atTrouble, maxTrouble, "")
	// A new member gets the earlier requests again.
	a.acked = a.b.load(atSequence)
	s.store(atAcked, a.acked)
	s.store(atRun, a.run)
	s.store(atState, stateAsks)
	err := a.judged(ctx)
	if err != nil && !s.cas(atState, stateAsks, stateFree) {
		s.cas(atState, stateMember, stateFree) // it was let in at this moment, and has been told nothing yet
	}
	return err
}

// judged waits for the home's verdict, and runs the litmus when the home does.
func (a *Agent) judged(ctx context.Context) error {
	asked := false
	for {
		verdict := a.slot.load(atVerdict)
		switch mine := a.slot.load(atJudged) == a.run; {
		case mine && verdict == verdictLitmus && !asked:
			asked = true
			report, err := ask(ctx, a.b.mem[atScratch:atScratch+ScratchBytes], 1, joining(), litmusWait)
			if err = errors.Join(err, report.Err()); err != nil {
				return err
			}
		case mine && verdict == verdictRefused:
			return ErrRefused
		case mine && verdict == verdictJoined:
			return nil
		}
		if err := pause(ctx, agentEvery); err != nil {
			return fmt.Errorf("waiting for the storage node that owns the device: %w", err)
		}
	}
}

// pause sleeps unless ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// errBoardGone: the agent's slot is not its own any more.
var errBoardGone = errors.New("the board does not have this agent any more: the device was formatted, or the operator took this host for gone")

// Serve carries out the home's commands until ctx ends, and ends all access then. nil: nothing of this host can write the device any more.
func (a *Agent) Serve(ctx context.Context) error {
	quiet := time.Now()
	for ctx.Err() == nil {
		if a.before != nil && !a.before() {
			return nil
		}
		if a.b.check() != nil || a.slot.load(atRun) != a.run || a.slot.load(atState) != stateMember {
			return errors.Join(errBoardGone, a.end())
		}
		a.beat()
		if a.step(ctx) {
			quiet = time.Now()
		}
		if time.Since(quiet) > eagerFor {
			_ = pause(ctx, agentEvery) // the loop looks at ctx
		}
	}
	return a.end()
}

// beat shows that the agent is at work.
func (a *Agent) beat() { a.slot.store(atBeat, a.slot.load(atBeat)+1) }

// beating starts a goroutine that beats while a command runs. The returned function ends it.
func (a *Agent) beating() (end func()) {
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(livesFor / 20)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				a.beat()
			case <-stop:
				return
			}
		}
	}()
	return func() { close(stop); <-stopped }
}

// step carries out the newest command if it is new. What fails is tried again: the home waits.
func (a *Agent) step(ctx context.Context) (done bool) {
	if a.b.load(atSequence) == a.acked {
		return false
	}
	c, sequence, err := a.b.newest()
	if c == nil && err == nil {
		return true // it is being written
	}
	if err == nil {
		err = a.carryOut(ctx, c)
	}
	if err != nil {
		a.slot.put(atTrouble, maxTrouble, err.Error())
		a.cfg.Log.Warn("a command of the storage node is not carried out, and tried again", "device", a.dev.Path, "error", err)
		return false
	}
	a.slot.put(atTrouble, maxTrouble, "")
	a.acked = sequence
	// Linearizes at: this store. All that the command asks for is done.
	a.slot.store(atAcked, sequence)
	return true
}

// carryOut does what a command says.
func (a *Agent) carryOut(ctx context.Context, c *command) error {
	ctx, cancel := context.WithTimeout(ctx, commandLimit)
	defer cancel()
	defer a.beating()()
	if a.during != nil {
		a.during()
	}
	switch c.op {
	case opBegin:
		return a.begin(ctx, c)
	case opKeys:
		a.keys.Set(c.keys...)
		return nil
	}
	v := a.serving
	if v == nil {
		return nil // no client has access here; when the home begins an incarnation it repeats open regions and fences (Home.all)
	}
	switch c.op {
	case opEndBelow:
		return v.access.EndBelow(ctx, c.next, c.serials)
	case opFence:
		return v.access.Fence(ctx, c.serials...)
	case opOpen:
		return a.open(ctx, v, c)
	}
	return v.close(ctx, uint32(c.region), c.epoch)
}

// begin ends what an earlier incarnation of the home has let onto the device, and serves the one of the command; 0: none.
func (a *Agent) begin(ctx context.Context, c *command) error {
	if v := a.serving; v != nil && v.incarnation == c.incarnation && v.cluster == c.cluster && v.node == c.node {
		a.keys.Set(c.keys...)
		return nil
	}
	if err := a.stop(ctx); err != nil || c.incarnation == 0 {
		return err
	}
	a.keys.Set(c.keys...)
	a.dev.Volatile = c.volatile
	v := &serving{cluster: c.cluster, node: c.node, incarnation: c.incarnation, regions: map[uint32]*part{}, access: host.New(c.cluster, a.keys, uint32(c.node), c.incarnation, a.cfg.Limits)}
	v.access.OnKill(func(pid int, why string) {
		a.cfg.Log.Warn("client killed", "device", a.dev.Path, "pid", pid, "reason", "the process "+why)
	})
	if a.cfg.Prepare != nil {
		a.cfg.Prepare(v.access)
	}
	v.server = shm.NewServer(v.access, a.cfg.Log)
	l, err := shm.Listen(a.cfg.Socket)
	if err != nil {
		return err
	}
	a.serving = v
	go func() {
		if err := v.server.Serve(l); err != nil {
			a.cfg.Log.Error("the socket is not served any more", "socket", a.cfg.Socket, "error", err)
		}
	}()
	a.cfg.Log.Info("serving the regions of a node to this host", "device", a.dev.Path, "node", c.node, "socket", a.cfg.Socket)
	return nil
}

// stop ends all access. nil: no process that was sent the device can write it.
func (a *Agent) stop(ctx context.Context) error {
	v := a.serving
	if v == nil {
		return nil
	}
	// The end of the connections has clients unmap the memory.
	if err := errors.Join(v.server.Close(), v.access.Withdraw(ctx)); err != nil {
		return err
	}
	for number, p := range v.regions {
		if err := p.memory.Close(); err != nil {
			return err
		}
		delete(v.regions, number)
	}
	a.serving = nil
	return nil
}

// open serves a region under an epoch.
func (a *Agent) open(ctx context.Context, v *serving, c *command) error {
	number := uint32(c.region)
	p := v.regions[number]
	if p != nil && (p.off != c.off || p.bytes != c.bytes) {
		if err := v.close(ctx, number, c.epoch-1); err != nil {
			return err
		}
		p = nil
	}
	if p == nil {
		mapped := (c.bytes + a.dev.Align - 1) &^ (a.dev.Align - 1)
		if regions, err := Area(a.dev); err != nil || c.off%a.dev.Align != 0 || c.off > regions || mapped > regions-c.off {
			return errors.Join(fmt.Errorf("region %d at %d, %d bytes, is not on this device of %d bytes, aligned to %d", number, c.off, c.bytes, a.dev.Bytes, a.dev.Align), err)
		}
		all := func([]byte) (uint64, error) { return c.bytes, nil }
		m, err := host.OpenDeviceMemory(a.dev, fmt.Sprintf("%s:region-%08d", a.dev.Path, number), c.off, mapped, all)
		if err != nil {
			return err
		}
		m.PartOf(a.whole, c.off)
		p = &part{memory: m, off: c.off, bytes: c.bytes}
		v.regions[number] = p
	}
	p.memory.Own(uint32(c.tenant))
	return v.access.OpenRegion(ctx, number, c.epoch, p.memory)
}

// close ends access to a region up to an epoch.
func (v *serving) close(ctx context.Context, number uint32, epoch uint64) error {
	if err := v.access.CloseRegion(ctx, number, epoch); err != nil {
		return err
	}
	if p := v.regions[number]; p != nil && !v.access.Serves(number) {
		delete(v.regions, number)
		return p.memory.Close()
	}
	return nil
}

// endLimit bounds the end of an agent.
const endLimit = 30 * time.Second

// end ends all access, and gives the slot back once nothing of this host can write the device. After an error the home goes on waiting for
// this host, until an agent of it has joined again.
func (a *Agent) end() error {
	ctx, cancel := context.WithTimeout(context.Background(), endLimit)
	defer cancel()
	if err := a.stop(ctx); err != nil {
		return err
	}
	if a.slot.load(atRun) == a.run {
		a.slot.cas(atState, stateMember, stateFree)
	}
	return errors.Join(a.whole.Close(), a.area.Unmap(), unlock(a.dev))
}

// unlock gives up the device.
func unlock(dev *pmem.Device) error {
	return errors.Join(unix.Flock(int(dev.File.Fd()), unix.LOCK_UN), dev.File.Close())
}
