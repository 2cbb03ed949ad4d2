package shared

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/internal/local"
)

const (
	// updates is how often each machine counts up.
	updates = 300
	// patience bounds waits for what must come, on emulated processors of a starved host.
	patience = 5 * time.Minute
	// hangs is the process that stops in the middle of its session.
	hangs = "hangs"
)

// inside is the program of one machine, or of a process of it.
func inside(ctx context.Context, quarry string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	switch {
	case quarry == hangs:
		return hang(ctx)
	case os.Getenv("RXE_ROLE") == "server":
		return server(ctx, quarry)
	}
	return other(ctx, quarry)
}

// connect opens a client over shm, as soon as the table shows where this host finds the memory.
func connect(ctx context.Context, address string) (cl *client.Client, err error) {
	return cl, again(ctx, func() error {
		cl, err = client.Connect(ctx, client.Config{Controllers: []string{"http://" + address + ":7420"}, Transport: client.TransportSHM, Timeout: patience})
		return err
	})
}

// again calls f until it works.
func again(ctx context.Context, f func() error) error {
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		}
	}
}

// count counts an object up.
func count(ctx context.Context, cl *client.Client, ref client.Ref, times int) error {
	for range times {
		if err := cl.Update(ctx, ref, func(old []byte) ([]byte, error) {
			return binary.LittleEndian.AppendUint64(nil, binary.LittleEndian.Uint64(old)+1), nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// server runs the cluster, counts, and waits for what the other machine does.
func server(ctx context.Context, quarry string) error {
	c, err := local.Start(ctx, local.Config{Binary: quarry, Nodes: 1, RegionBytes: "16MiB", Capacity: "48MiB", Lease: "5s", LogLevel: "info",
		Host:     func(string) local.Host { return local.Host{Address: os.Getenv("RXE_SELF")} },
		NodeArgs: []string{"--fabric", "tcp", "--data", os.Getenv("PMEM_SHARED"), "--shared", "--format", "--host", "host-a"}})
	if err != nil {
		return err
	}
	defer c.Stop()
	cl, err := connect(ctx, os.Getenv("RXE_SELF"))
	if err != nil {
		return err
	}
	ref, err := cl.Alloc(ctx, make([]byte, 8), client.AllocOptions{})
	if err != nil {
		return err
	}
	if _, err := cl.Names().Create(ctx, "counter", "count", ref); err != nil {
		return err
	}
	if err := count(ctx, cl, ref, updates); err != nil {
		return err
	}
	if err := again(ctx, func() error { _, err := cl.Names().Lookup(ctx, "done"); return err }); err != nil {
		return err
	}
	got, err := cl.Read(ctx, ref, nil)
	if err != nil {
		return err
	}
	// The process that hung had counted once.
	if n := binary.LittleEndian.Uint64(got); n != 2*updates+1 {
		return fmt.Errorf("the hosts have counted to %d, want %d", n, 2*updates+1)
	}
	fmt.Println("both hosts have counted to", 2*updates+1)
	return nil
}

// other shares the device, counts, has a client hang, and waits for its end.
func other(ctx context.Context, quarry string) error {
	share := exec.Command(quarry, "share", os.Getenv("PMEM_SHARED"), "--host", "host-b", "--wait-for-node", patience.String(), "--log-level", "info")
	share.Stdout, share.Stderr = os.Stdout, os.Stderr
	// The board is there when the node has begun.
	if err := again(ctx, func() error {
		return exec.CommandContext(ctx, quarry, "status", "-C", "http://"+os.Getenv("RXE_PEER")+":7420").Run()
	}); err != nil {
		return err
	}
	if err := share.Start(); err != nil {
		return err
	}
	cl, err := connect(ctx, os.Getenv("RXE_PEER"))
	if err != nil {
		return err
	}
	var ref client.Ref
	if err := again(ctx, func() error {
		n, err := cl.Names().Lookup(ctx, "counter")
		ref = n.Ref
		return err
	}); err != nil {
		return err
	}
	if err := again(ctx, func() error { return count(ctx, cl, ref, 1) }); err != nil { // until the table shows this host's agent
		return err
	}
	if err := count(ctx, cl, ref, updates-1); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	child := exec.Command(self)
	child.Env = append(os.Environ(), insideEnv+"="+hangs)
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	if err := child.Run(); child.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		return fmt.Errorf("the client that hung ended otherwise: %w", err)
	}
	fmt.Println("the client that hung was killed")
	if _, err := cl.Names().Create(ctx, "done", "count", ref); err != nil {
		return err
	}
	if err := cl.Close(); err != nil {
		return err
	}
	if err := share.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	return share.Wait()
}

// hang counts once over shm and stops, with its memory mapped.
func hang(ctx context.Context) error {
	cl, err := connect(ctx, os.Getenv("RXE_PEER"))
	if err != nil {
		return err
	}
	n, err := cl.Names().Lookup(ctx, "counter")
	if err != nil {
		return err
	}
	if err := count(ctx, cl, n.Ref, 1); err != nil {
		return err
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGSTOP); err != nil {
		return err
	}
	// Another thread may take the signal: this one can run on until the process stops.
	<-ctx.Done()
	return errors.New("the process that stopped was not killed")
}
