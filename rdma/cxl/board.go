package cxl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/zeebo/xxh3"

	"github.com/quarrystore/quarry/internal/keyring"
)

// The board is how the hosts of a shared device talk: words and bytes at the device's end, past what regions lie on. The home, the storage node that
// owns the regions, gives commands; each host agent that has joined carries them out on its host and acknowledges. Nothing else connects
// them, so an agent whose way to the memory is broken acknowledges nothing.
//
//	0        magic:8 version:8
//	64       home: seal of its incarnation   128 name of its host
//	256      sequence number of the newest command    320 its length  328 its checksum
//	64 KiB   slots of hosts, 1 KiB each
//	1 MiB    for the litmus
//	2 MiB    the newest command
//
// A word is stored by one side alone, but for a slot's state, which changes by CAS. What is behind a word is written before it and read
// after it; the litmus has shown that the hosts see it so (write-flag).
//
// Invariant: sequence numbers rise by one for each command, also over incarnations of the home. A command is given when the previous one is
// acknowledged by all members, or is given up: its caller got an error. Commands are idempotent, and an agent carries them out in the order of
// their numbers; it may miss one that was given up.
const (
	BoardBytes   = 6 << 20
	boardMagic   = 0x4458435952524151 // "QARRYCXD"
	boardVersion = 1

	atMagic, atVersion = 0, 8
	atHomeSeal         = 64
	atHomeHost         = 128
	atSequence         = 256
	atLength, atSum    = 320, 328
	atSlots            = 64 << 10
	atScratch          = 1 << 20
	atCommand          = 2 << 20

	slotBytes = 1 << 10
	// MaxHosts is how many other hosts may map a device.
	MaxHosts = 63

	maxCommandBytes = BoardBytes - atCommand
)

// Words and texts of a slot.
const (
	atState     = 0   // states below; changes by CAS
	atRun       = 64  // random, of the agent's process; stored before stateAsks
	atVerdict   = 128 // of the home, about the run at atJudged
	atJudged    = 136
	atAcked     = 192 // of the agent: the newest command that it has carried out
	atBeat      = 256 // of the agent: rises while it looks at the board
	atName      = 320 // of the host
	atBootID    = 400 // as clients compare it with theirs
	atSocket    = 480 // where the host's clients find the agent
	atTrouble   = 640 // why the newest command is not carried out
	atMachine   = 896 // AgentConfig.MachineID
	maxText     = 72
	maxSocket   = 112
	maxTrouble  = 250
	maxHostName = 64
)

// States of a slot.
const (
	stateFree   = 0
	stateMaking = 1 // an agent writes its name there
	stateAsks   = 2 // to join
	stateMember = 3 // it has been sent regions: no command is complete without it
)

// Verdicts of the home about an agent that asks.
const (
	verdictLitmus  = 1 // runs its side of the litmus
	verdictJoined  = 2
	verdictRefused = 3
)

// board is a mapping of it.
type board struct{ mem []byte }

func (b board) load(at int) uint64     { return atomic.LoadUint64(wordAt(b.mem, at)) }
func (b board) store(at int, v uint64) { atomic.StoreUint64(wordAt(b.mem, at), v) }
func (b board) cas(at int, old, v uint64) bool {
	return atomic.CompareAndSwapUint64(wordAt(b.mem, at), old, v)
}

// text reads a text of at most n bytes with its length in front of it. Both may change meanwhile: what comes out is a text of the board's.
func (b board) text(at, n int) string {
	s := make([]byte, n-8)
	size := min(b.load(at), uint64(len(s)))
	copy(s, b.mem[at+8:at+n])
	return strings.Clone(string(s[:size]))
}

// put writes a text; what does not fit is left out.
func (b board) put(at, n int, s string) {
	s = s[:min(len(s), n-8)]
	b.store(at, 0)
	copy(b.mem[at+8:at+n], s)
	b.store(at, uint64(len(s)))
}

func (b board) slot(i int) board {
	at := atSlots + i*slotBytes
	return board{b.mem[at : at+slotBytes : at+slotBytes]}
}

// errNoBoard: the device was not formatted for several hosts.
var errNoBoard = errors.New("holds no board for several hosts")

// check refuses memory that is no board.
func (b board) check() error {
	if b.load(atMagic) != boardMagic {
		return errNoBoard
	}
	if v := b.load(atVersion); v != boardVersion {
		return fmt.Errorf("its board for several hosts has version %d, this build has %d", v, boardVersion)
	}
	return nil
}

// format makes an empty board. Preconditions: no host uses the memory.
func (b board) format() {
	b.store(atMagic, 0)
	clear(b.mem[8 : atSlots+(MaxHosts+1)*slotBytes])
	b.store(atVersion, boardVersion)
	b.store(atMagic, boardMagic)
}

// What the home has the hosts do.
const (
	opBegin    = 1 // end all access of earlier incarnations, and serve this one's
	opKeys     = 2 // the controllers' keys
	opEndBelow = 3 // host.Access.EndBelow
	opFence    = 4 // host.Access.Fence
	opOpen     = 5 // host.Access.OpenRegion
	opClose    = 6 // host.Access.CloseRegion
)

// command is what the home has every member carry out.
type command struct {
	op          uint64
	node        uint64           // opBegin
	incarnation uint64           // opBegin
	cluster     [16]byte         // opBegin
	volatile    bool             // opBegin: nothing is flushed
	keys        []keyring.Public // opBegin and opKeys
	region      uint64           // opOpen and opClose
	epoch       uint64           // likewise
	off, bytes  uint64           // opOpen: where the region lies on the device
	tenant      uint64           // opOpen
	next        uint64           // opEndBelow
	serials     []uint64         // opEndBelow: those that live; opFence: those that end
}

const (
	commandHead = 14 * 8
	maxKeys     = keyring.MaxKeys
)

// encode is the command's form on the board: words.
func (c *command) encode() []byte {
	b := make([]byte, 0, commandHead+32*len(c.keys)+8*len(c.serials))
	volatile := uint64(0)
	if c.volatile {
		volatile = 1
	}
	for _, w := range []uint64{c.op, c.node, c.incarnation, binary.LittleEndian.Uint64(c.cluster[:]), binary.LittleEndian.Uint64(c.cluster[8:]),
		c.region, c.epoch, c.off, c.bytes, c.tenant, c.next, uint64(len(c.keys)), uint64(len(c.serials)), volatile} {
		b = binary.LittleEndian.AppendUint64(b, w)
	}
	for _, k := range c.keys {
		b = append(b, k[:]...)
	}
	for _, s := range c.serials {
		b = binary.LittleEndian.AppendUint64(b, s)
	}
	return b
}

// errCommand: the board holds no command of this form.
var errCommand = errors.New("malformed command on the board")

// decodeCommand reads a command.
func decodeCommand(b []byte) (*command, error) {
	if len(b) < commandHead {
		return nil, errCommand
	}
	w := func(i int) uint64 { return binary.LittleEndian.Uint64(b[8*i:]) }
	c := &command{op: w(0), node: w(1), incarnation: w(2), region: w(5), epoch: w(6), off: w(7), bytes: w(8), tenant: w(9), next: w(10), volatile: w(13) != 0}
	copy(c.cluster[:], b[24:40])
	keys, serials := w(11), w(12)
	if c.op < opBegin || c.op > opClose || keys > maxKeys || serials > maxCommandBytes/8 || uint64(len(b)) != commandHead+32*keys+8*serials {
		return nil, errCommand
	}
	b = b[commandHead:]
	for range keys {
		c.keys = append(c.keys, keyring.Public(b[:32]))
		b = b[32:]
	}
	for range serials {
		c.serials = append(c.serials, binary.LittleEndian.Uint64(b))
		b = b[8:]
	}
	return c, nil
}

// give writes a command and then its number. Preconditions: the caller alone gives commands.
// Linearizes at: the store of the number. An agent that reads the bytes while a later command overwrites them finds a wrong checksum, or another number.
func (b board) give(c *command) (sequence uint64, err error) {
	e := c.encode()
	if len(e) > maxCommandBytes {
		return 0, fmt.Errorf("a command of %d bytes for other hosts: at most %d", len(e), maxCommandBytes)
	}
	sequence = b.load(atSequence) + 1
	b.store(atSum, 0)
	copy(b.mem[atCommand:], e)
	b.store(atLength, uint64(len(e)))
	b.store(atSum, commandSum(e, sequence))
	b.store(atSequence, sequence)
	return sequence, nil
}

// commandSum is never 0.
func commandSum(e []byte, sequence uint64) uint64 { return xxh3.HashSeed(e, sequence) | 1 }

// newest reads the newest command; nil where it is being overwritten: look again.
func (b board) newest() (c *command, sequence uint64, err error) {
	sequence = b.load(atSequence)
	n := b.load(atLength)
	if n > maxCommandBytes {
		return nil, sequence, nil
	}
	e := make([]byte, n)
	copy(e, b.mem[atCommand:])
	if b.load(atSum) != commandSum(e, sequence) || b.load(atSequence) != sequence {
		return nil, sequence, nil
	}
	c, err = decodeCommand(e)
	return c, sequence, err
}
