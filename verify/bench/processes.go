package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/quarrystore/quarry/client"
)

// Work is the main loop of a client process: a job comes in as a line of JSON; it
// answers "ready", waits for a line, works, and answers with its outcome.
func Work(ctx context.Context, cfg client.Config, in io.Reader, out io.Writer) error {
	r := bufio.NewReader(in)
	line, err := r.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("job: %w", err)
	}
	var j Job
	if err := json.Unmarshal(line, &j); err != nil {
		return fmt.Errorf("job: %w", err)
	}
	o, err := session(ctx, cfg, j, func() error {
		fmt.Fprintln(out, "ready")
		_, err := r.ReadBytes('\n')
		return err
	})
	if err != nil {
		return err
	}
	if o.Hist, err = o.hist.Encode(hdrhistogram.V2CompressedEncodingCookieBase); err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(o)
}

// workInProcesses runs a job in n processes of a command at once.
func workInProcesses(ctx context.Context, command []string, n int, j Job) (*outcome, error) {
	type child struct {
		cmd *exec.Cmd
		in  io.WriteCloser
		out *bufio.Reader
		err strings.Builder
	}
	job, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, j.Duration+2*time.Minute)
	defer cancel()
	kids := make([]*child, n)
	defer func() {
		cancel()
		for _, k := range kids {
			if k != nil && k.cmd.Process != nil {
				k.in.Close()
				_ = k.cmd.Wait()
			}
		}
	}()
	for i := range kids {
		k := &child{cmd: exec.CommandContext(ctx, command[0], command[1:]...)}
		k.cmd.Stderr = &k.err
		if k.in, err = k.cmd.StdinPipe(); err != nil {
			return nil, err
		}
		out, err := k.cmd.StdoutPipe()
		if err != nil {
			return nil, err
		}
		k.out = bufio.NewReaderSize(out, 1<<20)
		if err := k.cmd.Start(); err != nil {
			return nil, err
		}
		kids[i] = k
		if _, err := fmt.Fprintf(k.in, "%s\n", job); err != nil {
			return nil, err
		}
	}
	for _, k := range kids {
		if line, err := k.out.ReadString('\n'); strings.TrimSpace(line) != "ready" {
			return nil, fmt.Errorf("a client process failed: %s (%v)", strings.TrimSpace(k.err.String()), err)
		}
	}
	for _, k := range kids {
		if _, err := fmt.Fprintln(k.in, "go"); err != nil {
			return nil, err
		}
	}
	sum := &outcome{hist: newHist()}
	for _, k := range kids {
		var o outcome
		if err := json.NewDecoder(k.out).Decode(&o); err != nil {
			return nil, fmt.Errorf("a client process failed: %s (%w)", strings.TrimSpace(k.err.String()), err)
		}
		h, err := hdrhistogram.Decode(o.Hist)
		if err != nil {
			return nil, err
		}
		sum.hist.Merge(h)
		sum.Ops, sum.Calls, sum.Errors = sum.Ops+o.Ops, sum.Calls+o.Calls, sum.Errors+o.Errors
		sum.cost = sum.cost.plus(o.cost)
		sum.Elapsed = max(sum.Elapsed, o.Elapsed)
		if sum.First == "" {
			sum.First = o.First
		}
	}
	return sum, nil
}
