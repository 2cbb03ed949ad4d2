package ddio

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/quarrystore/quarry/rdma/host"
)

// What --ddio may ask for.
const (
	On   = "on"   // into the caches
	Off  = "off"  // past them
	Keep = "keep" // leave it as it is
)

// ErrUnknown: the adapter is behind no root port whose switch is known.
var ErrUnknown = errors.New("no root port whose DDIO switch is known")

const intel = 0x8086

// known are root ports by device id, of Intel. Names are those of pci.ids; Cascade Lake has the ids of Skylake. Registers: Intel Xeon
// Processor Scalable Family, datasheet volume 2 (PERFCTRLSTS_0, PERFCTRLSTS_1), and the tool ddio.sh of librpma.
var known = map[uint16]string{
	0x2030: "Sky Lake-E root port A",
	0x2031: "Sky Lake-E root port B",
	0x2032: "Sky Lake-E root port C",
	0x2033: "Sky Lake-E root port D",
}

// Bytes of the configuration space, and their bits. WRITEs go past the caches if none of the three sends them there.
const (
	control      = 0x180  // the lowest byte of PERFCTRLSTS_0
	allocating   = 1 << 7 // Use_Allocating_Flow_Wr: ordinary WRITEs go into the caches
	noSnoop      = 1 << 3 // NoSnoopOpWrEn: leaves WRITEs without snooping out of the first
	hints        = 0x185  // the second byte of PERFCTRLSTS_1
	hintsIgnored = 1 << 0 // TPHDIS: WRITEs with processing hints count as ordinary ones
)

// Port is the root port that an adapter is behind.
type Port struct {
	Adapter string // such as mlx5_0
	Address string // such as 0000:17:00.0
	config  string // file of the configuration space
	uses    uses   // of this process and others
	pause   func() // between two tries to have the lock alone
}

// Another process holds the lock for a moment while it reads the switch, sets it as asked here too, or puts it back. One that relies
// on it holds the lock until it ends, which is not waited for.
const (
	tries    = 5
	tryAgain = 20 * time.Millisecond
)

var hostBridge = regexp.MustCompile(`^pci[0-9a-f]{4,8}:[0-9a-f]{2}$`)

// Find finds the root port of an RDMA device below a root of the file system. ErrUnknown if there is none in the table.
func Find(root, adapter string) (*Port, error) {
	at, err := filepath.EvalSymlinks(filepath.Join(root, "sys/class/infiniband", adapter, "device"))
	if err != nil {
		return nil, fmt.Errorf("adapter %s is no PCI device: %w", adapter, ErrUnknown)
	}
	port := at
	for !hostBridge.MatchString(filepath.Base(filepath.Dir(port))) {
		if port = filepath.Dir(port); port == "/" || port == "." {
			return nil, fmt.Errorf("adapter %s is no PCI device: %w", adapter, ErrUnknown)
		}
	}
	vendor, device := id(port, "vendor"), id(port, "device")
	if vendor != intel || known[device] == "" {
		return nil, fmt.Errorf("adapter %s is behind %s, a device %04x:%04x: %w", adapter, filepath.Base(port), vendor, device, ErrUnknown)
	}
	return &Port{pause: func() { time.Sleep(tryAgain) }, Adapter: adapter, Address: filepath.Base(port), config: filepath.Join(port, "config"),
		uses: uses{path: filepath.Join(root, "run", "quarry-ddio-"+filepath.Base(port))}}, nil
}

// id is a number of a PCI device, such as 0x8086; 0 if there is none.
func id(port, name string) uint16 {
	b, _ := os.ReadFile(filepath.Join(port, name))
	n, _ := strconv.ParseUint(strings.TrimSpace(string(b)), 0, 16)
	return uint16(n)
}

// Read says where WRITEs go now. Only root can.
func (p *Port) Read() (host.DDIO, error) {
	b, err := p.read()
	if err != nil {
		return host.DDIOUnknown, err
	}
	return state(b), nil
}

func state(b [2]byte) host.DDIO {
	if b[0]&(allocating|noSnoop) == 0 && b[1]&hintsIgnored != 0 {
		return host.DDIOOff
	}
	return host.DDIOOn
}

// read reads two bytes of the port's configuration space: of PERFCTRLSTS_0, the switch, and of
// the register that says what becomes of hints.
func (p *Port) read() (b [2]byte, err error) {
	f, err := os.Open(p.config)
	if err != nil {
		return b, p.refused(err)
	}
	defer f.Close()
	for i, off := range []int64{control, hints} {
		// The kernel shows others than root the first 64 bytes.
		if _, err := f.ReadAt(b[i:i+1], off); err != nil {
			return b, p.refused(err)
		}
	}
	return b, nil
}

func (p *Port) refused(err error) error {
	return fmt.Errorf("DDIO of root port %s, which adapter %s is behind: only root can reach it (CAP_SYS_ADMIN), and no process where the kernel is locked down: %w", p.Address, p.Adapter, err)
}

// Rely is Read for a process that goes by it: while it is off, no process switches it until Restore.
func (p *Port) Rely() (host.DDIO, error) {
	now, err := p.Read()
	if err != nil || now != host.DDIOOff {
		return now, err
	}
	if err := p.uses.share(); err != nil {
		return host.DDIOUnknown, err
	}
	if now, err = p.Read(); err != nil || now != host.DDIOOff {
		err = errors.Join(err, p.uses.close())
	}
	return now, err
}

// Set switches it on or off, checks that it is, and keeps it so until Restore. It is refused while others rely on the contrary.
func (p *Port) Set(want host.DDIO) error {
	if _, err := p.read(); err != nil {
		return err
	}
	for try := 1; ; try++ {
		alone, err := p.uses.alone()
		if err == nil && alone {
			err = p.change(want)
		}
		if err == nil {
			err = p.uses.share()
		}
		if err != nil {
			return errors.Join(err, p.Restore())
		}
		now, err := p.Read()
		if err == nil && now == want {
			return nil
		}
		if err == nil && try == tries {
			err = fmt.Errorf("DDIO of root port %s is %s, and other nodes of this host rely on it: give all of them the same --ddio", p.Address, now)
		}
		if err != nil {
			return errors.Join(err, p.Restore())
		}
		if err := p.uses.close(); err != nil { // others try too
			return err
		}
		p.pause()
	}
}

// Switch sets DDIO of the port on or off. Unlike Set it is not undone when this process ends: it holds until the next Set or Switch, or until
// the host restarts. An error if another process relies on the other setting.
func (p *Port) Switch(want host.DDIO) error {
	if _, err := p.read(); err != nil {
		return err
	}
	for try := 1; ; try++ {
		alone, err := p.uses.alone()
		switch {
		case err == nil && alone:
			if err = p.change(want); err == nil {
				err = p.uses.forget() // what was there before is not put back any more
			}
		case err == nil && try == tries:
			err = fmt.Errorf("DDIO of root port %s: nodes of this host rely on it as it is; stop them, or start them with --ddio %s", p.Address, want)
		}
		if err = errors.Join(err, p.uses.close()); err != nil || alone {
			return err
		}
		p.pause()
	}
}

// change switches it. Preconditions: no other process relies on it.
func (p *Port) change(want host.DDIO) error {
	b, err := p.read()
	if err != nil {
		return err
	}
	next := b
	next[0] &^= allocating | noSnoop
	next[1] |= hintsIgnored
	if want == host.DDIOOn {
		next[0] |= allocating
		next[1] &^= hintsIgnored
	}
	if state(b) == want {
		return nil
	}
	if err := p.uses.remember(b); err != nil { // also for a write of which a part fails
		return err
	}
	return p.write(next)
}

// Restore ends Rely or Set. The last process that relies on the port puts back what was there before the first changed it.
func (p *Port) Restore() error {
	if !p.uses.any() {
		return nil
	}
	alone, err := p.uses.alone()
	if err == nil && alone {
		var was [2]byte
		var changed bool
		if was, changed, err = p.uses.remembered(); err == nil && changed {
			if err = p.write(was); err == nil {
				err = p.uses.forget()
			}
		}
	}
	return errors.Join(err, p.uses.close())
}

// write stores both bytes, no other, and reads them back: a port may ignore it.
func (p *Port) write(b [2]byte) error {
	f, err := os.OpenFile(p.config, os.O_WRONLY, 0)
	if err != nil {
		return p.refused(err)
	}
	for i, off := range []int64{control, hints} {
		if _, err := f.WriteAt(b[i:i+1], off); err != nil {
			return errors.Join(p.refused(err), f.Close())
		}
	}
	if err := f.Close(); err != nil {
		return p.refused(err)
	}
	now, err := p.read()
	if err == nil && now != b {
		err = fmt.Errorf("DDIO of root port %s: wrote %02x and %02x, and reads %02x and %02x", p.Address, b[0], b[1], now[0], now[1])
	}
	return err
}
