package rxevm

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// imageOrSkip installs no packages, because a test run must not change the host.
func imageOrSkip(t *testing.T) *Image {
	t.Helper()
	if testing.Short() {
		t.Skip("boots a virtual machine; not with -short")
	}
	im, err := Prepare(t.Context(), Setup{Log: t.Output()})
	var missing *MissingError
	if errors.As(err, &missing) {
		t.Skipf("%v (or, as root: go run ./verify/rxevm/cmd/rxevm --prepare)", err)
	}
	require.NoError(t, err)
	return im
}

// The guest has a device that a pair of verbs programs communicate through, and the
// command's output, exit code and input files pass through unchanged.
func TestBoot(t *testing.T) {
	im := imageOrSkip(t)
	outDir := filepath.Join(t.TempDir(), "made, with comma")
	workDir := t.TempDir()
	var stdout, stderr bytes.Buffer
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	result, err := im.Run(ctx, Job{
		CPUs:   1, // tests in the machine have two
		Dir:    workDir,
		OutDir: outDir,
		Env:    append(os.Environ(), "WORD=it's one"),
		Stdout: &stdout, Stderr: &stderr,
		Command: []string{"sh", "-c", `
			pwd; echo "$WORD|$1"
			echo to stderr >/dev/stderr
			ibv_devinfo -d $RXE_DEVICE >"$RXE_OUT/devinfo" || exit 11
			: >escaped # lands in the overlay
			sleep 600 & # must not keep the machine
			ib_read_lat -d $RXE_DEVICE -x $RXE_GID_INDEX -s 128 -n 200 >/dev/null 2>&1 &
			server=$!
			i=0
			until ib_read_lat -d $RXE_DEVICE -x $RXE_GID_INDEX -s 128 -n 200 $RXE_PEER >"$RXE_OUT/lat" 2>&1; do
				i=$((i + 1)); [ $i -gt 100 ] && exit 12; sleep 0.1
			done
			wait $server || exit 13
			head -c 3000000 /dev/zero
			exit 42`, "sh", "second word"},
	})
	require.NoError(t, err)
	require.Equal(t, 42, result.Code, "stderr: %s", stderr.String())
	require.Equal(t, "to stderr\n", stderr.String())
	head := workDir + "\nit's one|second word\n"
	require.Equal(t, head, string(stdout.Bytes()[:len(head)]))
	require.Len(t, stdout.Bytes(), len(head)+3000000, "the last bytes before the exit count too")
	require.NoFileExists(t, filepath.Join(workDir, "escaped"), "the host's root must be read-only")

	devinfo, err := os.ReadFile(filepath.Join(outDir, "devinfo"))
	require.NoError(t, err)
	require.Regexp(t, `hca_id:\s+rxe0`, string(devinfo))
	require.Regexp(t, `state:\s+PORT_ACTIVE`, string(devinfo))
	lat, err := os.ReadFile(filepath.Join(outDir, "lat"))
	require.NoError(t, err)
	row := regexp.MustCompile(`(?m)^ 128 +200 +[\d.]+ +[\d.]+ +([\d.]+)`).FindSubmatch(lat)
	require.NotNil(t, row, "%s", lat)
	typical, err := strconv.ParseFloat(string(row[1]), 64)
	require.NoError(t, err)
	require.Positive(t, typical)
	t.Logf("%s, kernel %s: booted in %.1f s, ib_read_lat of 128 B typically %.1f us",
		result.Where, im.Kernel, result.Boot.Seconds(), typical)
}

// Two machines reach each other, and the exit code is that of the side that failed.
func TestBootTwo(t *testing.T) {
	im := imageOrSkip(t)
	var stdout bytes.Buffer
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	result, err := im.Run(ctx, Job{
		Two: true, MemoryMiB: 512, CPUs: 1, Stdout: &stdout, Stderr: t.Output(),
		Command: []string{"sh", "-c", `
			if [ $RXE_ROLE = server ]; then
				timeout 60 ibv_rc_pingpong -d $RXE_DEVICE -g $RXE_GID_INDEX -n 50 >/dev/null || exit 21
				echo served
				exit 0
			fi
			i=0
			until ibv_rc_pingpong -d $RXE_DEVICE -g $RXE_GID_INDEX -n 50 $RXE_PEER >/tmp/pong 2>&1; do
				i=$((i + 1)); [ $i -gt 100 ] && cat /tmp/pong && exit 22; sleep 0.1
			done
			echo "$RXE_SELF to $RXE_PEER"
			exit 5`},
	})
	require.NoError(t, err)
	require.Equal(t, 5, result.Code)
	require.Contains(t, stdout.String(), "server| served\n")
	require.Contains(t, stdout.String(), "client| 10.9.0.2 to 10.9.0.1\n")
}

// A job ends with its context. A guest whose kernel dies gives an error with the last
// kernel messages, not an exit code.
func TestBootEndsEarly(t *testing.T) {
	im := imageOrSkip(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	began := make(chan struct{})
	go func() {
		<-began
		cancel()
	}()
	_, err := im.Run(ctx, Job{Command: []string{"sh", "-c", "echo began; sleep 600"}, CPUs: 1, MemoryMiB: 512, Stdout: onWrite(func() { close(began) })})
	require.ErrorIs(t, err, context.Canceled)

	_, err = im.Run(t.Context(), Job{Command: []string{"sh", "-c", "echo c >/proc/sysrq-trigger; sleep 600"}, CPUs: 1, MemoryMiB: 512})
	require.ErrorContains(t, err, "ended while the command ran")
	require.ErrorContains(t, err, "Kernel panic")
}

// onWrite is a writer that calls the function on a Write. The command writes one line.
type onWrite func()

func (f onWrite) Write(p []byte) (int, error) {
	f()
	return len(p), nil
}
