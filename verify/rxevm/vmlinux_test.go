package rxevm

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// bzImage is an image with the payload behind one sector of set-up.
func bzImage(payload []byte) []byte {
	image := make([]byte, 1024)
	image[0x1f1] = 1
	copy(image[0x202:], "HdrS\x0f\x02")
	binary.LittleEndian.PutUint32(image[0x248:], 16)
	binary.LittleEndian.PutUint32(image[0x24c:], uint32(len(payload)))
	return append(append(image, make([]byte, 16)...), payload...)
}

// elfWith is an ELF file whose only segment has one note of Xen's.
func elfWith(note uint32) []byte {
	var b bytes.Buffer
	le := func(values ...any) {
		for _, v := range values {
			_ = binary.Write(&b, binary.LittleEndian, v)
		}
	}
	b.WriteString("\x7fELF\x02\x01\x01")
	b.Write(make([]byte, 9))
	le(uint16(2), uint16(62), uint32(1), uint64(0), uint64(64), uint64(0), uint32(0), uint16(64), uint16(56), uint16(1), uint16(64), uint16(0), uint16(0))
	le(uint32(4), uint32(4), uint64(120), uint64(0), uint64(0), uint64(24), uint64(24), uint64(4))
	le(uint32(4), uint32(8), note)
	b.WriteString("Xen\x00")
	le(uint64(0x1000000))
	return b.Bytes()
}

func gzipped(t *testing.T, b []byte) []byte {
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	_, err := z.Write(b)
	require.NoError(t, err)
	require.NoError(t, z.Close())
	return out.Bytes()
}

// A kernel that qemu can boot by its PVH entry is unpacked once; another boots compressed.
func TestKernelIsUnpackedOnce(t *testing.T) {
	cache := t.TempDir()
	k := kernel{version: "6.1.0-9-amd64", vmlinuz: filepath.Join(cache, "vmlinuz")}
	made := func(image []byte) string {
		require.NoError(t, os.WriteFile(k.vmlinuz, image, 0o644))
		name, err := cachedVmlinux(t.Context(), cache, k)
		require.NoError(t, err)
		return name
	}
	good := bzImage(gzipped(t, elfWith(18)))
	name := made(good)
	got, err := os.ReadFile(name)
	require.NoError(t, err)
	require.Equal(t, elfWith(18), got)
	require.NoError(t, os.WriteFile(name, []byte("kept"), 0o644))
	require.Equal(t, name, made(good), "made again")
	got, err = os.ReadFile(name)
	require.NoError(t, err)
	require.Equal(t, "kept", string(got))

	other := made(bzImage(gzipped(t, append(elfWith(18), 1))))
	require.NotEqual(t, name, other, "another kernel of the same version")
	for why, image := range map[string][]byte{
		"no PVH entry":        bzImage(gzipped(t, elfWith(17))),
		"no ELF file":         bzImage(gzipped(t, []byte("a kernel"))),
		"unknown compression": bzImage([]byte("BZh91AY&SY")),
		"cut off":             good[:len(good)-1],
		"more than gzip's":    bzImage(append(gzipped(t, elfWith(18)), 1, 2, 3, 4)),
		"no bzImage":          make([]byte, 4096),
		"short":               []byte("MZ"),
	} {
		require.Empty(t, made(image), why)
	}
	if tool("xz")() { // as Debian's kernels are: the size stands behind what xz makes
		cmd := exec.CommandContext(t.Context(), "xz", "-c")
		cmd.Stdin = bytes.NewReader(elfWith(18))
		packed, err := cmd.Output()
		require.NoError(t, err)
		size := len(elfWith(18))
		require.NotEmpty(t, made(bzImage(binary.LittleEndian.AppendUint32(bytes.Clone(packed), uint32(size)))))
		require.Empty(t, made(bzImage(binary.LittleEndian.AppendUint32(packed, uint32(size+1)))), "wrong size")
	}
}
