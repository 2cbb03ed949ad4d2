package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
)

// Gateway is the operation that measures a Redis gateway, a process of its own,
// beside a redis-server: GET and SET of random keys, with one connection and one
// command at a time, and with many connections and pipelines.
const Gateway = "gateway"

// gatewayShapes are the ways of asking that are measured.
var gatewayShapes = []struct{ clients, pipeline int }{{1, 1}, {1, 32}, {16, 32}}

// gatewaySlices is how often the two take turns: what else the machine does meets
// both alike.
const gatewaySlices = 6

func gatewayRun(ctx context.Context, cfg Config, cc client.Config, size int, tell func(Row)) error {
	keys := cfg.Job.Objects
	if keys == 0 {
		keys = kvKeys / 10
	}
	servers, stop, err := gatewayAndRedis(ctx, cfg, cc)
	if err != nil {
		return err
	}
	defer stop()
	for _, s := range servers {
		if err := redisFill(ctx, s.network, s.addr, keys, size); err != nil {
			return fmt.Errorf("%s: filling: %w", s.what, err)
		}
	}
	for _, shape := range gatewayShapes {
		for _, op := range []string{"GET", "SET"} {
			r := Row{Op: op, Bytes: size, Clients: shape.clients, Processes: 1}
			if shape.pipeline > 1 {
				r.Batch = shape.pipeline
			}
			err := inTurns(servers, r, func(slice, i int) (*outcome, error) {
				return clients(shape.clients, func(id int) (*outcome, error) {
					return redisKVLoop(ctx, servers[i].network, servers[i].addr, op, slice*64+id, keys, size, shape.pipeline, cfg.Job.Duration/gatewaySlices)
				})
			}, tell)
			if err != nil {
				return fmt.Errorf("%s: %w", op, err)
			}
		}
	}
	return nil
}

// redisServer answers the Redis protocol at an address.
type redisServer struct{ what, network, addr string }

// gatewayAndRedis starts a gateway on a tree of its own, and a redis-server if one is installed.
func gatewayAndRedis(ctx context.Context, cfg Config, cc client.Config) (servers []redisServer, stop func(), err error) {
	c, err := client.Connect(ctx, cc)
	if err != nil {
		return nil, nil, err
	}
	name := fmt.Sprintf("bench/gateway/%d/%d", os.Getpid(), time.Now().UnixNano())
	addr, stopGateway, err := startGateway(ctx, append(cfg.Command(Gateway), "--transport", cc.Transport, "--tree", name))
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("gateway: %w", err), c.Close())
	}
	stop = func() {
		stopGateway()
		dctx := context.WithoutCancel(ctx)
		if t, err := kv.Open(dctx, c, name, btree.Config{}); err == nil {
			_ = t.Drop(dctx)
		}
		_ = c.Close()
	}
	servers = []redisServer{{"gateway " + cc.Transport, "tcp", addr}}
	if path, err := exec.LookPath("redis-server"); err == nil {
		addr, _, stopRedis, err := startRedis(ctx, path)
		if err != nil {
			stop()
			return nil, nil, fmt.Errorf("redis-server: %w", err)
		}
		servers = append(servers, redisServer{"redis", "tcp", addr})
		stopped := stop
		stop = func() { stopRedis(); stopped() }
	}
	return servers, stop, nil
}

// inTurns measures servers in slices, one after the other, and tells a row for each.
func inTurns(servers []redisServer, row Row, measure func(slice, server int) (*outcome, error), tell func(Row)) error {
	sums := make([]outcome, len(servers))
	for i := range sums {
		sums[i].hist = newHist()
	}
	for slice := range gatewaySlices {
		for i, s := range servers {
			o, err := measure(slice, i)
			if err != nil {
				return fmt.Errorf("%s: %w", s.what, err)
			}
			sums[i].hist.Merge(o.hist)
			sums[i].Ops += o.Ops
			sums[i].Elapsed += o.Elapsed
		}
	}
	var rates []float64
	for i, s := range servers {
		r := row
		r.What = s.what
		r.quantiles(sums[i].hist)
		r.rate(sums[i].Ops, sums[i].Elapsed)
		if rates = append(rates, r.OpsPerS); i > 0 {
			r.Note = fmt.Sprintf("the gateway does %.2f of this", rates[0]/r.OpsPerS)
		}
		tell(r)
	}
	return nil
}

// startGateway starts a gateway and waits for its address.
func startGateway(ctx context.Context, command []string) (addr string, stop func(), err error) {
	cmd := exec.Command(command[0], command[1:]...)
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", nil, err
	}
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	stop = func() {
		_ = cmd.Process.Signal(os.Interrupt)
		timer := time.AfterFunc(5*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		timer.Stop()
	}
	undo := context.AfterFunc(ctx, func() { _ = cmd.Process.Kill() })
	defer undo()
	line, err := bufio.NewReader(out).ReadString('\n')
	var ready struct{ Address string }
	if err == nil {
		err = json.Unmarshal([]byte(line), &ready)
	}
	if err == nil {
		_, _, err = net.SplitHostPort(ready.Address)
	}
	if err != nil {
		stop()
		return "", nil, errors.Join(errors.New(strings.TrimSpace(errs.String())), err)
	}
	return ready.Address, stop, nil
}
