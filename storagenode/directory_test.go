package storagenode

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
	"github.com/quarrystore/quarry/storagenode/state"
	"github.com/stretchr/testify/require"
)

const deviceBytes = 256 << 20

// onLedger is a formatted directory whose losses of power show.
func onLedger(t *testing.T) (*directory, *pmem.Ledger) {
	mem := make([]byte, directoryBytes)
	l := pmem.NewLedger(mem)
	d := &directory{mem: mem, flush: l.Flusher(), bytes: deviceBytes}
	require.ErrorIs(t, d.read(), errNoDirectory)
	require.NoError(t, d.format())
	return d, l
}

func reopened(image []byte) (*directory, error) {
	d := &directory{mem: image, bytes: deviceBytes}
	return d, d.read()
}

// A change that was acknowledged survives every loss of power, and one that power fails in leaves the directory before
// it or after it: whatever the coin of each word.
func TestDirectorySurvivesLossesOfPower(t *testing.T) {
	if testing.Short() {
		t.Skip("one goroutine reads a directory hundreds of times; not with -short")
	}
	d, ledger := onLedger(t)
	coins := func(seed uint64) map[string]func() bool {
		return map[string]func() bool{"none": pmem.None, "all": pmem.All, "half": pmem.Half(seed), "other half": pmem.Half(seed + 1)}
	}
	for round := range 5 {
		before := fmt.Sprint(d.extents, d.kept)
		var extents []extent
		for i := range round {
			extents = append(extents, extent{region: uint32(10*round + i + 1), off: directoryBytes + uint64(i)<<20, bytes: 1 << 20})
		}
		kept := bytes.Repeat([]byte{byte(round + 1)}, 8*(1+100*round))
		after := fmt.Sprint(extents, kept)
		step := 0
		ledger.Before = func() {
			step++
			for name, coin := range coins(uint64(100*round + step)) {
				got, err := reopened(ledger.Cut(coin))
				require.NoError(t, err, "round %d, step %d, %s survives", round, step, name)
				require.Contains(t, []string{before, after}, fmt.Sprint(got.extents, got.kept))
			}
		}
		require.NoError(t, d.write(extents, kept))
		require.Equal(t, 4, step, "two write-backs, two fences")
		ledger.Before = nil
		for name, coin := range coins(uint64(round)) {
			got, err := reopened(ledger.Cut(coin))
			require.NoError(t, err)
			require.Equal(t, after, fmt.Sprint(got.extents, got.kept), "acknowledged; %s survives", name)
		}
	}
}

// Formatting that power fails in is begun again; a directory that was acknowledged and is damaged is never taken for an
// older one, nor for none.
func TestDamagedDirectoriesAreRefused(t *testing.T) {
	if testing.Short() {
		t.Skip("one goroutine reads a directory hundreds of times; not with -short")
	}
	mem := bytes.Repeat([]byte("someone else's! "), directoryBytes/16)
	ledger := pmem.NewLedger(mem)
	d := &directory{mem: mem, flush: ledger.Flusher(), bytes: deviceBytes}
	ledger.Before = func() {
		for seed := range uint64(8) {
			if _, err := reopened(ledger.Cut(pmem.Half(seed))); err != nil {
				require.ErrorIs(t, err, errNoDirectory)
			}
		}
	}
	require.NoError(t, d.format())
	ledger.Before = nil
	require.NoError(t, d.write([]extent{{1, directoryBytes, 1 << 20}}, []byte("12345678")))
	require.NoError(t, d.write([]extent{{2, directoryBytes, 1 << 20}}, []byte("87654321")))
	good := bytes.Clone(mem)
	newest := commitBytes + int(d.sequence%2)*imageBytes
	for name, at := range map[string]int{"commit word": 0, "sequence in it": 3, "magic": newest, "version": newest + 8, "own sequence": newest + 16, "size": newest + 24,
		"length": newest + 32, "count": newest + 40, "checksum": newest + 48, "extent": newest + imageHead, "state": newest + imageHead + extentBytes} {
		copy(mem, good)
		mem[at] ^= 0x40
		_, err := reopened(mem)
		require.Error(t, err, name)
		require.NotErrorIs(t, err, errNoDirectory, name)
	}
	copy(mem, good)
	older := commitBytes + int((d.sequence+1)%2)*imageBytes
	clear(mem[older : older+4096])
	got, err := reopened(mem)
	require.NoError(t, err, "the older image is of no use")
	require.Equal(t, d.extents, got.extents)
	require.ErrorContains(t, (&directory{mem: mem, bytes: 2 * deviceBytes}).read(), "was resized")
	foreign := bytes.Repeat([]byte("someone else's  "), directoryBytes/16)
	_, err = reopened(foreign)
	require.ErrorIs(t, err, errNoDirectory)
}

// fakeDevice is a file in place of a device.
func fakeDevice(t *testing.T, path string, align uint64) *pmem.Device {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	require.NoError(t, f.Truncate(deviceBytes))
	return &pmem.Device{File: f, Path: path, Bytes: deviceBytes, Align: align}
}

// While a region is being made, which takes long, its place is taken and the device is free for all else: the state is saved,
// other regions are made and removed, the room is counted. A directory read then does not know it.
func TestRegionsAreMadeBesideEachOther(t *testing.T) {
	dev := fakeDevice(t, filepath.Join(t.TempDir(), "dax0.0"), 2<<20)
	d, err := openDevice(dev, proto.DomainCPU, true, false)
	require.NoError(t, err)
	defer d.close(true)
	total := d.space().AvailableBytes
	const small = proto.MinRegionBytes
	header := func(region uint32) *proto.RegionHeader {
		return &proto.RegionHeader{Domain: proto.DomainCPU, Cluster: [16]byte{9}, RegionBytes: small, Region: region}
	}
	first, err := d.claim(header(1))
	require.NoError(t, err)
	require.Equal(t, total-small, d.space().AvailableBytes)
	_, err = d.claim(header(1))
	require.ErrorContains(t, err, "already")
	require.NoError(t, d.save((&state.Kept{Cluster: [16]byte{9}, Term: 7}).Encode()))
	second, err := d.create(header(2))
	require.NoError(t, err)
	require.NoError(t, second.Close())
	third, err := d.claim(header(3))
	require.NoError(t, err)
	named := func() (regions []uint32) {
		got, err := reopened(bytes.Clone(d.area.Mem[:directoryBytes]))
		require.NoError(t, err)
		for _, e := range got.extents {
			regions = append(regions, e.region)
		}
		return regions
	}
	require.Equal(t, []uint32{2}, named())
	require.NoError(t, d.conclude(first, true))
	require.Equal(t, []uint32{1, 2}, named(), "in order of their offsets")
	require.NoError(t, d.conclude(third, false))
	require.NoError(t, d.remove(2))
	require.Equal(t, []uint32{1}, named())
	require.Equal(t, total-small, d.space().AvailableBytes)
	again, err := d.claim(header(4))
	require.NoError(t, err)
	require.Equal(t, first.off+first.bytes, again.off)
}

// Regions of a device are found again, their room is used again, and nothing is formatted that was not asked for.
func TestRegionsOnADevice(t *testing.T) {
	path := filepath.Join(t.TempDir(), "dax0.0")
	dev := fakeDevice(t, path, 2<<20)
	_, err := openDevice(dev, proto.DomainCPU, false, false)
	require.ErrorIs(t, err, errNoDirectory)
	require.ErrorContains(t, err, "--format")
	d, err := openDevice(dev, proto.DomainCPU, true, false)
	require.NoError(t, err)
	total := d.space().AvailableBytes
	require.Equal(t, "devdax", d.space().Kind)
	header := func(region uint32, bytes uint64) *proto.RegionHeader {
		return &proto.RegionHeader{Domain: proto.DomainCPU, UUID: [16]byte{byte(region)}, Cluster: [16]byte{9}, RegionBytes: bytes, Region: region, Epoch: 3}
	}
	const small = proto.MinRegionBytes
	for region := uint32(1); region <= 3; region++ {
		m, err := d.create(header(region, small))
		require.NoError(t, err)
		copy(m.Bytes()[1<<20:], fmt.Sprintf("region %d", region))
		require.NoError(t, m.Persist(1<<20, 64))
		_, err = m.Descriptor(true)
		require.ErrorContains(t, err, "every region")
		require.NoError(t, m.Close())
	}
	_, err = d.create(header(2, small))
	require.ErrorContains(t, err, "already")
	_, err = d.create(header(4, 4*deviceBytes))
	require.ErrorIs(t, err, host.ErrNoSpace)
	require.NoError(t, d.save((&state.Kept{Cluster: [16]byte{9}, Term: 7}).Encode()))
	require.NoError(t, d.remove(2))
	require.NoError(t, d.remove(2))
	require.Equal(t, total-2*small, d.space().AvailableBytes)
	d.close(true)

	d, err = openDevice(dev, proto.DomainCPU, true, false) // what is formatted is used as it is
	require.NoError(t, err)
	kept, err := d.load()
	require.NoError(t, err)
	require.EqualValues(t, 7, kept.Term)
	list, missing, err := d.scan(t.Context(), kept)
	require.NoError(t, err)
	require.Empty(t, missing)
	require.Len(t, list, 2)
	for i, region := range []uint32{1, 3} {
		require.Equal(t, region, list[i].region.Number)
		require.EqualValues(t, 3, list[i].region.Epoch)
		require.Equal(t, fmt.Sprintf("region %d", region), string(list[i].memory.Bytes()[1<<20:][:8]))
		require.NoError(t, list[i].memory.Close())
	}
	m, err := d.create(header(5, small)) // where 2 was, which left something there
	require.NoError(t, err)
	require.Equal(t, make([]byte, small-proto.RegionHeaderBytes), m.Bytes()[proto.RegionHeaderBytes:])
	require.NoError(t, m.Close())
	require.Equal(t, total-3*small, d.space().AvailableBytes)

	// Another cluster's, another domain's, and a damaged region stop the node.
	_, _, err = d.scan(t.Context(), state.Kept{Cluster: [16]byte{8}})
	require.ErrorContains(t, err, "belongs to cluster")
	d.domain = proto.DomainAdapter
	_, _, err = d.scan(t.Context(), kept)
	require.ErrorContains(t, err, "serves the domain")
	d.domain = proto.DomainCPU
	first := d.dir.extents[0].off
	d.close(true)
	_, err = openDevice(&pmem.Device{File: dev.File, Path: path, Bytes: deviceBytes, Align: 64 << 20}, proto.DomainCPU, false, false)
	require.ErrorContains(t, err, "alignment")
	_, err = openDevice(&pmem.Device{File: dev.File, Path: path, Bytes: 8 << 20, Align: 4096}, proto.DomainCPU, true, false)
	require.ErrorContains(t, err, "needs at least")
	_, err = dev.File.WriteAt([]byte("damage"), int64(first)+40)
	require.NoError(t, err)
	d, err = openDevice(dev, proto.DomainCPU, false, false)
	require.NoError(t, err)
	defer d.close(true)
	_, _, err = d.scan(t.Context(), kept)
	require.ErrorContains(t, err, "region 1")
}
