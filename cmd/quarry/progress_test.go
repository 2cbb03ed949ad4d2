package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// openTerminal is a new pseudo-terminal.
func openTerminal(t *testing.T) *os.File {
	ours, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { ours.Close() })
	require.NoError(t, unix.IoctlSetPointerInt(int(ours.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(ours.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	its, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if errors.Is(err, os.ErrNotExist) {
		t.Skip("no /dev/pts is mounted")
	}
	require.NoError(t, err)
	t.Cleanup(func() { its.Close() })
	return its
}

// TestBarsAreForTerminals: a bar moves the cursor, which only a terminal can.
func TestBarsAreForTerminals(t *testing.T) {
	terminal := openTerminal(t)
	t.Setenv("TERM", "xterm")
	require.NotNil(t, (&app{cli: &cli{}, errOut: terminal}).progress("copy").p)
	require.Nil(t, (&app{cli: &cli{}, errOut: &bytes.Buffer{}}).progress("copy").p, "not a terminal")
	json := &cli{}
	json.JSON = true
	require.Nil(t, (&app{cli: json, errOut: terminal}).progress("copy").p, "--json")
	t.Setenv("TERM", "dumb")
	none := (&app{cli: &cli{}, errOut: terminal}).progress("copy")
	require.Nil(t, none.p)
	none.set(1, 2)
	none.end()
}
