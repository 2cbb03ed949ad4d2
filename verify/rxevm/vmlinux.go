package rxevm

import (
	"bytes"
	"context"
	"crypto/sha256"
	"debug/elf"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
)

// cachedVmlinux is the kernel as qemu can boot it without its decompressor, which takes an emulated processor three
// seconds: cache/vmlinux-VERSION-HASH, made once. It is empty where this qemu or kernel cannot do that; the compressed one boots too.
// Preconditions: the caller holds the cache lock.
func cachedVmlinux(ctx context.Context, cache string, k kernel) (string, error) {
	image, err := os.ReadFile(k.vmlinuz)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(image)
	name := filepath.Join(cache, fmt.Sprintf("vmlinux-%s-%x", k.version, sum[:6]))
	if file(name)() {
		return name, nil
	}
	unpacked, err := unpackKernel(ctx, image)
	if err != nil || !hasPVH(unpacked) {
		return "", nil // of a format that we do not know, or built without CONFIG_PVH
	}
	tmp := name + ".tmp"
	if err := os.WriteFile(tmp, unpacked, 0o644); err != nil {
		return "", err
	}
	return name, os.Rename(tmp, name)
}

// unpackKernel returns the ELF file in a bzImage (The Linux/x86 Boot Protocol: setup_sects, payload_offset, payload_length).
func unpackKernel(ctx context.Context, image []byte) ([]byte, error) {
	if len(image) < 0x250 || string(image[0x202:0x206]) != "HdrS" || binary.LittleEndian.Uint16(image[0x206:]) < 0x208 {
		return nil, errors.New("no bzImage with a payload")
	}
	sectors := int(image[0x1f1])
	if sectors == 0 {
		sectors = 4
	}
	from := (sectors+1)*512 + int(binary.LittleEndian.Uint32(image[0x248:]))
	to := from + int(binary.LittleEndian.Uint32(image[0x24c:]))
	if to-from < 8 || to > len(image) {
		return nil, errors.New("the payload is not in the image")
	}
	payload := image[from:to]
	size := binary.LittleEndian.Uint32(payload[len(payload)-4:])
	var unpack []string
	switch {
	case bytes.HasPrefix(payload, []byte("\xfd7zXZ\x00")):
		unpack, payload = []string{"xz", "-dc"}, payload[:len(payload)-4]
	case bytes.HasPrefix(payload, []byte("\x28\xb5\x2f\xfd")):
		unpack, payload = []string{"zstd", "-qdc"}, payload[:len(payload)-4]
	case bytes.HasPrefix(payload, []byte("\x1f\x8b")): // the size is gzip's own
		unpack = []string{"gzip", "-dc"}
	default:
		return nil, fmt.Errorf("unknown compression %x", payload[:4])
	}
	cmd := exec.CommandContext(ctx, unpack[0], unpack[1:]...)
	cmd.Stdin = bytes.NewReader(payload)
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", unpack[0], err)
	}
	if uint32(len(out)) != size {
		return nil, fmt.Errorf("%d bytes in a payload of %d", len(out), size)
	}
	return out, nil
}

// hasPVH reports whether an ELF file names the entry through which qemu boots it: a note of Xen's, PHYS32_ENTRY.
func hasPVH(kernel []byte) bool {
	f, err := elf.NewFile(bytes.NewReader(kernel))
	if err != nil {
		return false
	}
	const physicalEntry = 18
	for _, p := range f.Progs {
		if p.Type != elf.PT_NOTE {
			continue
		}
		for r := p.Open(); ; {
			var note struct{ Name, Desc, Type uint32 }
			if binary.Read(r, f.ByteOrder, &note) != nil || note.Name > 64 || note.Desc > 4096 {
				break
			}
			text := make([]byte, (note.Name+3)&^3+(note.Desc+3)&^3)
			if _, err := io.ReadFull(r, text); err != nil {
				break
			}
			if note.Type == physicalEntry && bytes.HasPrefix(text, []byte("Xen\x00")) {
				return true
			}
		}
	}
	return false
}
