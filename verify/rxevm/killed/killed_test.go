package killed

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/verify/rxevm"
	"github.com/quarrystore/quarry/verify/testbinary"
)

var kills = flag.Int("kills", 2, "times that TestMachineKilled kills its machine")

// insideEnv has the test binary be the program in the machine: the quarry binary.
const insideEnv = "QUARRY_TEST_INSIDE"

// lastEnv has that program end after the check.
const lastEnv = "QUARRY_TEST_LAST"

// patience bounds the wait for what must come, on emulated processors of a starved host.
const patience = 5 * time.Minute

func TestMain(m *testing.M) {
	if binary := os.Getenv(insideEnv); binary != "" {
		if err := inside(context.Background(), binary); err != nil {
			fmt.Fprintln(os.Stderr, "inside:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// writer changes objects of its own, one after the other, and notes what was acknowledged on the host.
type writer struct {
	transport string
	cl        *client.Client
	refs      []client.Ref
	values    []uint64 // acknowledged
	journal   *os.File // of lines: a reference and the acknowledged value
}

func payload(value uint64) []byte {
	return bytes.Repeat(binary.LittleEndian.AppendUint64(nil, value), 64)
}

// inside starts the cluster as the NVDIMM holds it, checks what was acknowledged, and works until it is killed.
func inside(ctx context.Context, binary string) error {
	dir := filepath.Join(os.Getenv("PMEM_FSDAX"), "cluster")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	c, err := local.Start(ctx, local.Config{Binary: binary, Nodes: 2, Dir: dir, Keep: true,
		RegionBytes: "16MiB", Capacity: "48MiB", Lease: "10s"})
	if err != nil {
		return err
	}
	var writers []*writer
	checked := 0
	for _, transport := range []string{client.TransportTCP, client.TransportSHM} {
		w := &writer{transport: transport}
		n, err := w.open(ctx, c.URL)
		if err != nil {
			return fmt.Errorf("%s: %w", transport, err)
		}
		writers, checked = append(writers, w), checked+n
	}
	fmt.Println("checked", checked)
	if os.Getenv(lastEnv) != "" {
		return nil // the cluster ends with the machine
	}
	failed := make(chan error)
	for _, w := range writers {
		go func() { failed <- w.work(ctx) }()
	}
	return <-failed
}

// open connects, makes the objects or checks those that are there, and says how many were checked.
func (w *writer) open(ctx context.Context, url string) (checked int, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	path := filepath.Join(os.Getenv("RXE_OUT"), w.transport)
	had, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, err
	}
	if w.cl, err = client.Connect(ctx, client.Config{Controllers: []string{url}, Transport: w.transport, Replicas: 2, Durability: client.Durable, Timeout: patience}); err != nil {
		return 0, err
	}
	if w.journal, err = os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY|os.O_SYNC, 0o600); err != nil { // the guest would cache what it writes
		return 0, err
	}
	at := map[string]int{}
	for line := range strings.Lines(string(had)) {
		var ref string
		var value uint64
		if n, _ := fmt.Sscanf(line, "%s %d\n", &ref, &value); n != 2 || !strings.HasSuffix(line, "\n") {
			break // the machine was killed in the middle of it
		}
		if _, ok := at[ref]; !ok {
			r, err := proto.ParseRef(ref)
			if err != nil {
				return 0, err
			}
			at[ref] = len(w.refs)
			w.refs, w.values = append(w.refs, r), append(w.values, 0)
		}
		w.values[at[ref]] = value
	}
	for i, ref := range w.refs {
		got, err := w.cl.Read(ctx, ref, nil)
		if err != nil {
			return 0, fmt.Errorf("read %v: %w", ref, err)
		}
		value := binary.LittleEndian.Uint64(got)
		if !bytes.Equal(got, payload(value)) || value < w.values[i] || value > w.values[i]+1 {
			return 0, fmt.Errorf("LOST: %v has %d, of %d bytes; %d was acknowledged", ref, value, len(got), w.values[i])
		}
		w.values[i] = value
	}
	for checked = len(w.refs); len(w.refs) < 8; {
		ref, err := w.cl.Alloc(ctx, payload(1), client.AllocOptions{})
		if err != nil {
			return 0, err
		}
		w.refs, w.values = append(w.refs, ref), append(w.values, 1)
		if err := w.note(len(w.refs) - 1); err != nil {
			return 0, err
		}
	}
	return checked, nil
}

func (w *writer) note(i int) error {
	_, err := fmt.Fprintf(w.journal, "%v %d\n", w.refs[i], w.values[i])
	return err
}

func (w *writer) work(ctx context.Context) error {
	for n := 0; ; n++ {
		i := n % len(w.refs)
		if err := w.cl.Write(ctx, w.refs[i], payload(w.values[i]+1)); err != nil {
			return fmt.Errorf("%s: %w", w.transport, err)
		}
		w.values[i]++
		if err := w.note(i); err != nil {
			return err
		}
		if n == len(w.refs) {
			fmt.Println("works")
		}
	}
}

// TestMachineKilled: a machine is killed at random moments of a durable load, and comes back with every value that was acknowledged.
func TestMachineKilled(t *testing.T) {
	if testing.Short() {
		t.Skip("boots virtual machines; not with -short")
	}
	im, err := rxevm.Prepare(t.Context(), rxevm.Setup{Log: t.Output()})
	var missing *rxevm.MissingError
	if errors.As(err, &missing) {
		t.Skipf("%v (or, as root: go run ./verify/rxevm/cmd/rxevm --prepare)", err)
	}
	require.NoError(t, err)
	self, err := os.Executable()
	require.NoError(t, err)
	// One processor: emulated processors wait for each other in loops, which doubles the processor time of this test.
	job := rxevm.Job{CPUs: 1, Command: []string{self}, PmemMiB: 512, PmemDir: t.TempDir(), OutDir: t.TempDir(), Stderr: t.Output(),
		Env: append(os.Environ(), insideEnv+"="+filepath.Join(testbinary.Build(t, "./cmd/quarry"), "quarry"))}
	checked := 0
	for range *kills {
		checked += boot(t, im, job, true)
	}
	job.Env = append(job.Env, lastEnv+"=1")
	checked += boot(t, im, job, false)
	acknowledged := 0
	for _, transport := range []string{client.TransportTCP, client.TransportSHM} {
		b, err := os.ReadFile(filepath.Join(job.OutDir, transport))
		require.NoError(t, err)
		acknowledged += bytes.Count(b, []byte("\n"))
	}
	require.Equal(t, 16**kills, checked)
	t.Logf("%d kills, %d changes acknowledged, %d objects checked, none lost", *kills, acknowledged, checked)
}

// boot runs the machine until its program ends, or until it is killed while it works, and says how many objects were checked.
func boot(t *testing.T, im *rxevm.Image, job rxevm.Job, kill bool) (checked int) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	r, w := io.Pipe()
	job.Stdout = w
	worked := 0
	read := make(chan struct{})
	go func() {
		defer close(read)
		for lines := bufio.NewScanner(r); lines.Scan(); {
			if lines.Text() == "works" {
				if worked++; worked == 2 && kill { // both writers do
					time.AfterFunc(time.Duration(rand.Int64N(int64(2*time.Second))), cancel)
				}
			}
			_, _ = fmt.Sscanf(lines.Text(), "checked %d", &checked)
		}
	}()
	result, err := im.Run(ctx, job)
	w.Close()
	<-read
	if kill {
		require.ErrorIs(t, err, context.Canceled, "exit code %d", result.Code)
		require.Equal(t, 2, worked)
		return checked
	}
	require.NoError(t, err)
	require.Zero(t, result.Code)
	return checked
}
