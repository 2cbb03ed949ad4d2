package redis

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"

	"github.com/quarrystore/quarry/btree/kv"
)

// ErrNoCLI: redis-cli is not installed.
var ErrNoCLI = errors.New("redis-cli is not installed")

// AskCLI starts a gateway to a tree, on a free port of this machine, asks redis-cli
// for each of some keys of database 0, one process for each, and ends the gateway.
// The values are in the order of the keys; nil is a key that is not there.
func AskCLI(ctx context.Context, tree *kv.Tree, keys []string) (values [][]byte, err error) {
	path, err := exec.LookPath("redis-cli")
	if err != nil {
		return nil, ErrNoCLI
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	host, port, _ := net.SplitHostPort(l.Addr().String())
	sctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- New(Config{Tree: tree, SweepKeys: -1}).Serve(sctx, l) }()
	defer func() {
		cancel()
		err = errors.Join(err, <-done)
	}()
	ask := func(args ...string) ([]byte, error) {
		cmd := exec.CommandContext(ctx, path, append([]string{"-h", host, "-p", port, "--raw"}, args...)...)
		out, err := cmd.Output()
		if err != nil {
			return nil, fmt.Errorf("redis-cli %s: %w", args[0], err)
		}
		return bytes.TrimSuffix(out, []byte("\n")), nil
	}
	for _, key := range keys {
		// With --raw nothing and an error look like values: ask how long it is, too.
		length, err := ask("STRLEN", key)
		if err != nil {
			return nil, err
		}
		value, err := ask("GET", key)
		if err != nil {
			return nil, err
		}
		switch {
		case string(length) == fmt.Sprint(len(value)) && len(value) > 0:
		case string(length) == "0" && len(value) == 0:
			there, err := ask("EXISTS", key)
			if err != nil {
				return nil, err
			}
			if value = nil; string(there) == "1" {
				value = []byte{}
			}
		default:
			return nil, fmt.Errorf("redis-cli GET %s: %d bytes, STRLEN says %s", key, len(value), length)
		}
		values = append(values, value)
	}
	return values, nil
}
