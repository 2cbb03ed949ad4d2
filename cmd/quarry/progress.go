package main

import (
	"os"

	"github.com/schollz/progressbar/v3"
)

// bar shows progress of long work: on a terminal that can move its cursor, without --json.
type bar struct{ p *progressbar.ProgressBar }

// progress begins a bar on a terminal. Elsewhere, and with --json, the methods of the bar do nothing.
func (a *app) progress(what string) *bar {
	if a.cli.JSON || os.Getenv("TERM") == "dumb" || !isTerminal(a.errOut) {
		return &bar{}
	}
	return &bar{progressbar.NewOptions(-1, progressbar.OptionSetDescription(what), progressbar.OptionSetWriter(os.Stderr),
		progressbar.OptionClearOnFinish(), progressbar.OptionShowCount(), progressbar.OptionSetWidth(30), progressbar.OptionThrottle(1e8))}
}

// set shows that done of total are done.
func (b *bar) set(done, total int) {
	if b.p == nil || total == 0 {
		return
	}
	if b.p.GetMax() != total {
		b.p.ChangeMax(total)
	}
	_ = b.p.Set(done)
}

// end removes the bar.
func (b *bar) end() {
	if b.p != nil {
		_ = b.p.Finish()
	}
}
