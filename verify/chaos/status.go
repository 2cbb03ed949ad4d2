package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/quarrystore/quarry/fsck"
)

// status is what is looked at of quarry status.
type status struct {
	Controllers []struct {
		URL    string `json:"url"`
		Leader bool   `json:"leader"`
	} `json:"controllers"`
	Nodes []struct {
		Name  string `json:"name"`
		State string `json:"state"`
	} `json:"nodes"`
	Regions []struct {
		ID       uint32 `json:"id"`
		State    string `json:"state"`
		Replicas []struct {
			Name  string `json:"name"`
			State string `json:"state"`
		} `json:"replicas"`
	} `json:"regions"`
}

// ill says what is wrong with a cluster; "" if it is whole.
func (s *status) ill(replicas int) string {
	for _, n := range s.Nodes {
		if n.State != "up" {
			return fmt.Sprintf("node %s is %s", n.Name, n.State)
		}
	}
	for _, g := range s.Regions {
		inSync := 0
		for _, rep := range g.Replicas {
			if rep.State == "in_sync" {
				inSync++
			}
		}
		if g.State != "open" || inSync < replicas {
			return fmt.Sprintf("region %d is %s with %d of %d replicas in sync", g.ID, g.State, inSync, replicas)
		}
	}
	return ""
}

// whole waits until every node is up and every region has all its replicas.
func (r *run) whole(ctx context.Context) error {
	ill := "no status has come yet"
	for until := time.Now().Add(healTimeout); time.Now().Before(until); r.sleep(ctx, pollEvery) {
		var s status
		if _, err := r.quarry(ctx, &s, "status"); err != nil {
			ill = err.Error()
		} else if ill = s.ill(r.cfg.Replicas); ill == "" {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return fmt.Errorf("not whole after %v: %s", healTimeout, ill)
}

// clean waits until fsck finds nothing. What dead clients have left is cleared
// after their fence; findings that stay are the cluster's.
func (r *run) clean(ctx context.Context, row *Row) error {
	if err := r.whole(ctx); err != nil {
		return err
	}
	for until := time.Now().Add(healTimeout); ; r.sleep(ctx, pollEvery) {
		var rep fsck.Report
		code, err := r.quarry(ctx, &rep, "fsck", "--fabric", "tcp")
		if err == nil && rep.OK() {
			return nil
		}
		if time.Now().After(until) || ctx.Err() != nil {
			if code == exitDamaged {
				for _, f := range rep.Findings {
					row.Findings = append(row.Findings, f.String())
				}
				return nil
			}
			return err
		}
	}
}

// quarry runs the command against one controller after the other, like an operator who
// does not know which of them answer.
func (r *run) quarry(ctx context.Context, into any, args ...string) (code int, err error) {
	h, err := r.net.host("ops")
	if err != nil {
		return -1, err
	}
	for _, url := range r.cluster.URLs {
		all := append(append(append([]string{}, h.Run...), r.cfg.Binary), args...)
		all = append(all, "--json", "--timeout", "5s", "-C", url)
		cctx, cancel := context.WithTimeout(ctx, healTimeout)
		cmd := exec.CommandContext(cctx, all[0], all[1:]...)
		cmd.Env = append(os.Environ(), r.asOperator...)
		var errs strings.Builder
		cmd.Stderr = &errs
		var out []byte
		out, err = cmd.Output()
		cancel()
		code = cmd.ProcessState.ExitCode()
		if code != exitUnreachable {
			if into != nil && len(out) > 0 {
				if jerr := json.Unmarshal(out, into); jerr != nil {
					return code, fmt.Errorf("quarry %s: %w", args[0], jerr)
				}
			}
			if err != nil {
				err = fmt.Errorf("quarry %s: %s", strings.Join(args, " "), lastLine(errs.String()))
			}
			return code, err
		}
		err = fmt.Errorf("quarry %s: %s", strings.Join(args, " "), lastLine(errs.String()))
	}
	return code, err
}
