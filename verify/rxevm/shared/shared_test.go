package shared

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/verify/rxevm"
	"github.com/quarrystore/quarry/verify/testbinary"
)

// insideEnv has the test binary be a program in one of the machines: the quarry binary, or what a process of it does.
const insideEnv = "QUARRY_TEST_INSIDE"

func TestMain(m *testing.M) {
	if binary := os.Getenv(insideEnv); binary != "" {
		if err := inside(context.Background(), binary); err != nil {
			fmt.Println("inside:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// image prepares the machine, or skips the test.
func image(t *testing.T) *rxevm.Image {
	if testing.Short() {
		t.Skip("boots virtual machines; not with -short")
	}
	im, err := rxevm.Prepare(t.Context(), rxevm.Setup{Log: t.Output()})
	var missing *rxevm.MissingError
	if errors.As(err, &missing) {
		t.Skipf("%v (or, as root: go run ./verify/rxevm/cmd/rxevm --prepare)", err)
	}
	require.NoError(t, err)
	return im
}

// litmus runs quarry litmus on the memory of two machines with so many processors each, and returns what both print and the exit code.
func litmus(t *testing.T, im *rxevm.Image, cpus int) (said string, code int) {
	binary := filepath.Join(testbinary.Build(t, "./cmd/quarry"), "quarry")
	var out bytes.Buffer
	r, err := im.Run(t.Context(), rxevm.Job{Two: true, SharedMiB: 64, CPUs: cpus, Accel: "tcg", MemoryMiB: 1024, Env: os.Environ(), Stdout: &out, Stderr: &out,
		Command: []string{"sh", "-c", `side=0; [ "$RXE_ROLE" = server ] || side=1; exec "$0" litmus --memory "$PMEM_SHARED" --overwrite --wait-for-side 4m --side $side`, binary}})
	require.NoError(t, err, "%s", &out)
	return out.String(), r.Code
}

// TestCoherentMachines: machines whose atomics are atomic to each other pass.
func TestCoherentMachines(t *testing.T) {
	said, code := litmus(t, image(t), 2)
	t.Log("\n" + said)
	require.Zero(t, code, said)
	require.NotContains(t, said, "UNFIT")
}

// TestIncoherentMachines: machines whose atomics are not are refused.
func TestIncoherentMachines(t *testing.T) {
	said, code := litmus(t, image(t), 1)
	t.Log("\n" + said)
	require.NotZero(t, code, said)
	require.Contains(t, said, "the hosts do not see one coherent memory: it must not carry Quarry")
}

// TestTwoHosts: a storage node on one machine, and clients on both that execute their verbs on its memory. Updates of both add up, and the
// fence of a client that hangs on the other machine kills it there.
func TestTwoHosts(t *testing.T) {
	im := image(t)
	self, err := os.Executable()
	require.NoError(t, err)
	var out bytes.Buffer
	r, err := im.Run(t.Context(), rxevm.Job{Two: true, SharedMiB: 128, CPUs: 2, Accel: "tcg", MemoryMiB: 1024, Stdout: &out, Stderr: &out, Command: []string{self},
		Env: append(os.Environ(), insideEnv+"="+filepath.Join(testbinary.Build(t, "./cmd/quarry"), "quarry"))})
	require.NoError(t, err, "%s", &out)
	t.Log("\n" + out.String())
	require.Zero(t, r.Code)
	require.Contains(t, out.String(), "server| both hosts have counted to")
	require.Contains(t, out.String(), "client| the client that hung was killed")
}
