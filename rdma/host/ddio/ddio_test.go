package ddio

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/rdma/host"
)

// fake makes a root with the adapter mlx5_0 behind a root port, with a switch between them.
func fake(t *testing.T, vendor, device string, config []byte) string {
	root := t.TempDir()
	port := filepath.Join(root, "sys/devices/pci0000:17/0000:17:00.0")
	adapter := filepath.Join(port, "0000:18:00.0/0000:19:08.0/0000:1a:00.0")
	class := filepath.Join(root, "sys/class/infiniband/mlx5_0")
	require.NoError(t, os.MkdirAll(adapter, 0o700))
	require.NoError(t, os.MkdirAll(class, 0o700))
	require.NoError(t, os.Symlink(adapter, filepath.Join(class, "device")))
	for name, text := range map[string]string{"vendor": vendor + "\n", "device": device + "\n", "config": string(config)} {
		require.NoError(t, os.WriteFile(filepath.Join(port, name), []byte(text), 0o600))
	}
	require.NoError(t, os.WriteFile(filepath.Join(adapter, "vendor"), []byte("0x15b3\n"), 0o600))
	return root
}

// space is a configuration space of 4 KiB with these two bytes.
func space(control0, hints0 byte) []byte {
	b := make([]byte, 4096)
	for i := range b {
		b[i] = byte(i * 7)
	}
	b[control], b[hints] = control0, hints0
	return b
}

// WRITEs go past the caches only if no bit sends some of them there.
func TestRead(t *testing.T) {
	for _, c := range []struct {
		control, hints byte
		want           host.DDIO
	}{
		{0x80, 0, host.DDIOOn},     // as it comes
		{0x80, 1, host.DDIOOn},     // ordinary WRITEs
		{0, 0, host.DDIOOn},        // those with hints
		{0x08, 1, host.DDIOOn},     // those without snooping
		{0x77, 0xff, host.DDIOOff}, // other bits do not matter
	} {
		p, err := Find(fake(t, "0x8086", "0x2031", space(c.control, c.hints)), "mlx5_0")
		require.NoError(t, err)
		require.Equal(t, "0000:17:00.0", p.Address, "the root port, not the switch between")
		got, err := p.Read()
		require.NoError(t, err)
		require.Equal(t, c.want, got, "%02x %02x", c.control, c.hints)
	}
}

// Setting changes the three bits and no other, is read back, and put back to what it was.
func TestSetAndRestore(t *testing.T) {
	root := fake(t, "0x8086", "0x2030", space(0xd9, 0x42))
	config := filepath.Join(root, "sys/devices/pci0000:17/0000:17:00.0/config")
	is := func(control, hints byte) {
		t.Helper()
		b, err := os.ReadFile(config)
		require.NoError(t, err)
		require.Equal(t, space(control, hints), b)
	}
	p, err := Find(root, "mlx5_0")
	require.NoError(t, err)
	require.NoError(t, p.Set(host.DDIOOn))
	require.NoError(t, p.Restore())
	is(0xd9, 0x42) // nothing to do
	require.NoError(t, p.Set(host.DDIOOff))
	is(0x51, 0x43)
	now, err := p.Read()
	require.NoError(t, err)
	require.Equal(t, host.DDIOOff, now)
	require.NoError(t, p.Restore())
	is(0xd9, 0x42)

	require.NoError(t, p.Set(host.DDIOOff))
	require.NoError(t, p.uses.close()) // the process is killed, and restores nothing
	p, err = Find(root, "mlx5_0")
	require.NoError(t, err)
	require.NoError(t, p.Set(host.DDIOOn))
	is(0xd1, 0x42)
	require.NoError(t, p.Restore())
	is(0xd9, 0x42) // from before the first
}

// Nodes behind one port share its switch: it stays as long as one of them relies on it, the last puts it back, whichever that is,
// and none changes it under others.
func TestNodesShareASwitch(t *testing.T) {
	for _, last := range []string{"one that set it", "one that went by it"} {
		root := fake(t, "0x8086", "0x2030", space(0x80, 0))
		var ports [3]*Port
		for i := range ports {
			p, err := Find(root, "mlx5_0")
			require.NoError(t, err)
			ports[i] = p
		}
		a, b, c := ports[0], ports[1], ports[2]
		now := func() host.DDIO {
			t.Helper()
			d, err := c.Read()
			require.NoError(t, err)
			return d
		}
		seen, err := b.Rely()
		require.NoError(t, err)
		require.Equal(t, host.DDIOOn, seen, "nothing to keep")
		require.NoError(t, a.Set(host.DDIOOff))
		if last == "one that set it" {
			require.NoError(t, b.Set(host.DDIOOff))
		} else {
			seen, err = b.Rely()
			require.NoError(t, err)
			require.Equal(t, host.DDIOOff, seen)
		}
		require.ErrorContains(t, c.Set(host.DDIOOn), "is off, and other nodes of this host rely on it")
		require.NoError(t, a.Restore())
		require.Equal(t, host.DDIOOff, now(), last)
		require.ErrorContains(t, c.Set(host.DDIOOn), "rely on it", last)
		require.NoError(t, a.Restore(), "once more")
		require.NoError(t, b.Restore())
		require.Equal(t, host.DDIOOn, now(), last)
		require.NoError(t, c.Set(host.DDIOOn))
		require.ErrorContains(t, a.Set(host.DDIOOff), "is on, and other nodes of this host rely on it")
		require.NoError(t, c.Restore())
		require.NoError(t, a.Set(host.DDIOOff))
		require.NoError(t, a.Restore())
		require.Equal(t, host.DDIOOn, now())
	}
}

// A lock that another process holds for a moment is waited for; one that a node holds while it runs is not for ever.
func TestSetTriesAgain(t *testing.T) {
	root := fake(t, "0x8086", "0x2030", space(0x80, 0))
	find := func() *Port {
		p, err := Find(root, "mlx5_0")
		require.NoError(t, err)
		return p
	}
	other, p := find(), find()
	set := map[string]func(host.DDIO) error{"Set": p.Set, "Switch": p.Switch}
	for name, set := range set {
		require.NoError(t, other.Set(host.DDIOOff))
		pauses := 0
		p.pause = func() { pauses++ }
		require.ErrorContains(t, set(host.DDIOOn), "rely on it", name)
		require.Equal(t, tries-1, pauses, name)
		p.pause = func() { require.NoError(t, other.Restore()) }
		require.NoError(t, set(host.DDIOOn), name)
		require.NoError(t, p.Restore())
	}
}

// A switch that is set for good stays when the last node has ended, and nodes put back what it was set to.
func TestSwitchStays(t *testing.T) {
	root := fake(t, "0x8086", "0x2030", space(0xd9, 0x42))
	p, err := Find(root, "mlx5_0")
	require.NoError(t, err)
	is := func(want host.DDIO) {
		t.Helper()
		now, err := p.Read()
		require.NoError(t, err)
		require.Equal(t, want, now)
	}
	require.NoError(t, p.Switch(host.DDIOOff))
	is(host.DDIOOff)
	node, err := Find(root, "mlx5_0")
	require.NoError(t, err)
	require.NoError(t, node.Set(host.DDIOOn))
	is(host.DDIOOn)
	require.NoError(t, node.Restore())
	is(host.DDIOOff)
	require.NoError(t, p.Switch(host.DDIOOn))
	is(host.DDIOOn)
	b, err := os.ReadFile(filepath.Join(root, "sys/devices/pci0000:17/0000:17:00.0/config"))
	require.NoError(t, err)
	require.Equal(t, space(0xd1, 0x42), b, "no other bit")
}

// Adapters without such a port, and ports of other parts, are refused with what they are.
func TestUnknownPartsAreRefused(t *testing.T) {
	for name, c := range map[string]struct{ vendor, device, want string }{
		"AMD":         {"0x1022", "0x1483", "0000:17:00.0, a device 1022:1483"},
		"same number": {"0x1022", "0x2030", "1022:2030"},
		"newer Intel": {"0x8086", "0x347a", "8086:347a"},
		"unreadable":  {"", "", "0000:0000"},
	} {
		_, err := Find(fake(t, c.vendor, c.device, space(0, 1)), "mlx5_0")
		require.ErrorIs(t, err, ErrUnknown, name)
		require.ErrorContains(t, err, c.want, name)
	}
	root := fake(t, "0x8086", "0x2030", space(0, 1))
	_, err := Find(root, "mlx5_1")
	require.ErrorIs(t, err, ErrUnknown)
	// A device of software, such as rxe.
	virtual := filepath.Join(root, "sys/devices/virtual/rxe0")
	require.NoError(t, os.MkdirAll(virtual, 0o700))
	require.NoError(t, os.MkdirAll(filepath.Join(root, "sys/class/infiniband/rxe0"), 0o700))
	require.NoError(t, os.Symlink(virtual, filepath.Join(root, "sys/class/infiniband/rxe0/device")))
	_, err = Find(root, "rxe0")
	require.ErrorIs(t, err, ErrUnknown)
	require.ErrorContains(t, err, "no PCI device")
}

// The kernel shows users the first 64 bytes: that is an error, not a port with zeros.
func TestOnlyRootReadsIt(t *testing.T) {
	p, err := Find(fake(t, "0x8086", "0x2033", make([]byte, 64)), "mlx5_0")
	require.NoError(t, err)
	got, err := p.Read()
	require.Equal(t, host.DDIOUnknown, got)
	require.ErrorContains(t, err, "only root")
	require.ErrorContains(t, p.Set(host.DDIOOff), "only root")
}
