package chaos

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/host/pmem"
)

// powerCuts counts what the losses of power of a run have done.
type powerCuts struct {
	cuts, files, lines int
}

// coins say which of the words that were not durable survive a loss of power, one after the other. The seed is the
// number of the loss.
var coins = []struct {
	name     string
	survives func(seed uint64) func() bool
}{
	{"half", pmem.Half},
	{"none", func(uint64) func() bool { return pmem.None }},
	{"all", func(uint64) func() bool { return pmem.All }},
}

// needsLedgers says why durable objects cannot be kept; "" where they can. Nodes keep them only on a file system that they trust.
func needsLedgers(cfg Config) string {
	dir := cfg.Dir
	if dir == "" {
		dir = os.TempDir()
	}
	fs, err := host.FileSystemOf(dir)
	switch {
	case err != nil:
		return err.Error()
	case fs.Volatile != nil:
		return fmt.Sprintf("a folder (-dir) that survives a loss of power: %v", fs.Volatile)
	}
	return ""
}

// makeLedgers makes the folder of the ledgers and names it to the processes that are started from now on.
func (r *run) makeLedgers() ([]string, error) {
	dir, err := filepath.EvalSymlinks(r.dir)
	if err != nil {
		return nil, err
	}
	dir = filepath.Join(dir, "ledgers")
	r.ledgers = []string{pmem.LedgersVariable + "=" + dir}
	return r.ledgers, os.Mkdir(dir, 0o700)
}

// powerOff kills all storage nodes, and the clients that map their memory since they are on the same hosts, and gives the regions what a
// loss of power leaves of them. The processes need not end at the same
// moment: a flush is in the ledger before it is answered, so what a client was told is there.
func powerOff(_ context.Context, r *run) error {
	r.targets, r.off, r.target = nil, nil, "all nodes"
	for i := range r.cfg.Nodes {
		r.targets = append(r.targets, nodeName(i))
	}
	for _, w := range r.workers {
		if w.cfg.Transport == client.TransportSHM {
			w.expected = true
			r.off = append(r.off, w)
		}
	}
	for _, w := range r.off {
		w.process.Kill()
	}
	if err := r.killTargets(); err != nil {
		return err
	}
	coin := coins[r.cuts.cuts%len(coins)]
	files, lines, err := pmem.PowerOff(filepath.Join(r.dir, "ledgers"), coin.survives(uint64(r.cuts.cuts)))
	r.cuts.cuts, r.cuts.files, r.cuts.lines = r.cuts.cuts+1, r.cuts.files+files, r.cuts.lines+lines
	if err == nil && files == 0 {
		err = fmt.Errorf("no region was flushed to a ledger: nothing would be shown")
	}
	r.cfg.Say("power: of the words that were not durable %s survive: %d lines of %d files are not as they were", coin.name, lines, files)
	return err
}

// powerOn starts them again.
func powerOn(ctx context.Context, r *run) error {
	if err := restartTargets(ctx, r); err != nil {
		return err
	}
	for _, r.worker = range r.off {
		if err := r.replaceWorker(ctx); err != nil {
			return err
		}
	}
	return nil
}
