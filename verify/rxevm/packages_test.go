package rxevm

import (
	"bytes"
	"fmt"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAbsentPackages(t *testing.T) {
	yes, no := func() bool { return true }, func() bool { return false }
	some := []need{{pkg: "here", present: yes}, {pkg: "gone", present: no}, {pkg: "headers", present: no, build: true}}
	require.Equal(t, []string{"gone"}, absent(some, false))
	require.Equal(t, []string{"gone", "headers"}, absent(some, true))
}

func TestMissingErrorIsOneLine(t *testing.T) {
	err := &MissingError{"qemu-system-x86, perftest", "run as root: apt-get install qemu-system-x86 perftest"}
	require.Equal(t, "missing qemu-system-x86, perftest: run as root: apt-get install qemu-system-x86 perftest", err.Error())
}

// TestCpioFormat reads the archive back the way the kernel does: fixed-width
// hexadecimal fields, name and content each padded to four bytes.
func TestCpioFormat(t *testing.T) {
	var b bytes.Buffer
	ar := cpioWriter{w: &b}
	ar.add("bin", 0o040755, nil)
	ar.add("init", 0o100755, []byte("12345"))
	ar.add("bin/x", 0o100644, []byte("12345678"))
	require.NoError(t, ar.close())

	var got []string
	raw := b.Bytes()
	round := func(n int) int { return (n + 3) &^ 3 }
	for at := 0; ; {
		require.Equal(t, "070701", string(raw[at:at+6]))
		field := func(i int) int {
			n, err := strconv.ParseUint(string(raw[at+6+8*i:at+14+8*i]), 16, 32)
			require.NoError(t, err)
			return int(n)
		}
		mode, size, nameSize := field(1), field(6), field(11)
		name := string(raw[at+110 : at+110+nameSize-1])
		require.Zero(t, raw[at+110+nameSize-1])
		at = at + round(110+nameSize)
		content := string(raw[at : at+size])
		at += round(size)
		if name == "TRAILER!!!" {
			require.Equal(t, len(raw), at)
			break
		}
		got = append(got, fmt.Sprintf("%s %o %s", name, mode, content))
	}
	require.Equal(t, []string{"bin 40755 ", "init 100755 12345", "bin/x 100644 12345678"}, got)
}
