package chaos

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/quarrystore/quarry/client"
)

// Report is what a number of runs have shown.
type Report struct {
	Network     string          `json:"network"` // namespaces, or why not
	Controllers int             `json:"controllers"`
	Nodes       int             `json:"nodes"`
	Replicas    int             `json:"replicas"`
	Slab        client.SlabKind `json:"slab,omitempty"` // of all mutable objects; 0: PAIR
	OpenWords   bool            `json:"open_words,omitempty"`
	Lease       string          `json:"lease"`
	Trust       string          `json:"trust"` // mutual TLS, or none
	Rows        []*Row          `json:"rows"`
	Skipped     []string        `json:"skipped,omitempty"`
	Seconds     float64         `json:"seconds"`
}

// Row is about one fault.
type Row struct {
	Fault      string    `json:"fault"`
	Runs       int       `json:"runs"` // times that it was injected and healed
	Operations int       `json:"operations"`
	Succeeded  int       `json:"succeeded"`
	Unknown    int       `json:"unknown"`
	Gaps       []float64 `json:"gaps_s"`               // longest time without any success on some object, per run
	ChangeGaps []float64 `json:"change_gaps_s"`        // without a successful change
	LinesLost  int       `json:"lines_lost,omitempty"` // of memory, that losses of power have taken a word of
	Lost       []string  `json:"lost,omitempty"`
	Illegal    []string  `json:"illegal,omitempty"`
	Undecided  []string  `json:"undecided,omitempty"`
	Findings   []string  `json:"findings,omitempty"` // of fsck after healing
	Problems   []string  `json:"problems,omitempty"` // the cluster did not heal, a client failed
}

// maxKept bounds each list of a row; what is beyond it is more of the same.
const maxKept = 100

func (r *Row) problem(format string, args ...any) {
	r.Problems = append(r.Problems, fmt.Sprintf(format, args...))
}

// OK says that nothing is wrong and something was shown.
func (r *Row) OK() bool {
	return r.Runs > 0 && len(r.Lost)+len(r.Illegal)+len(r.Undecided)+len(r.Findings)+len(r.Problems) == 0
}

// OK says that every run was good.
func (r *Report) OK() bool {
	return len(r.Rows) > 0 && !slices.ContainsFunc(r.Rows, func(row *Row) bool { return !row.OK() })
}

func (r *Report) add(row *Row) {
	for _, have := range r.Rows {
		if have.Fault != row.Fault {
			continue
		}
		have.Runs += row.Runs
		have.Operations += row.Operations
		have.Succeeded += row.Succeeded
		have.Unknown += row.Unknown
		have.Gaps = append(have.Gaps, row.Gaps...)
		have.ChangeGaps = append(have.ChangeGaps, row.ChangeGaps...)
		have.LinesLost += row.LinesLost
		have.Lost = keep(have.Lost, row.Lost)
		have.Illegal = keep(have.Illegal, row.Illegal)
		have.Undecided = keep(have.Undecided, row.Undecided)
		have.Findings = keep(have.Findings, row.Findings)
		have.Problems = keep(have.Problems, row.Problems)
		return
	}
	r.Rows = append(r.Rows, row)
}

func keep(a, b []string) []string {
	if a = append(a, b...); len(a) > maxKept {
		a = a[:maxKept]
	}
	return a
}

// worst of some seconds, as text.
func worst(s []float64) string {
	if len(s) == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", slices.Max(s))
}

// middle of some seconds, as text.
func middle(s []float64) string {
	if len(s) == 0 {
		return "-"
	}
	s = slices.Sorted(slices.Values(s))
	return fmt.Sprintf("%.2f", s[len(s)/2])
}

func (r *Row) String() string {
	s := fmt.Sprintf("%s: %d runs, %d operations, gap %s s, of changes %s s, lost %d, illegal %d, findings %d",
		r.Fault, r.Runs, r.Operations, worst(r.Gaps), worst(r.ChangeGaps), len(r.Lost), len(r.Illegal), len(r.Findings))
	for _, list := range [][]string{r.Problems, r.Lost, r.Illegal, r.Undecided, r.Findings} {
		for i, p := range list {
			if i == 5 {
				s += fmt.Sprintf("\n  and %d more", len(list)-i)
				break
			}
			s += "\n  " + p
		}
	}
	return s
}

// Text prints the report as a table.
func (r *Report) Text(out io.Writer) {
	slabs := ""
	if r.Slab != 0 {
		slabs = fmt.Sprintf(", %v slabs", r.Slab)
	}
	if r.OpenWords {
		slabs += ", open words"
	}
	fmt.Fprintf(out, "\n%d controllers, %d storage nodes, %d replicas%s, lease %s; network: %s; trust: %s; %.0f s\n\n", r.Controllers, r.Nodes, r.Replicas, slabs, r.Lease, r.Network, r.Trust, r.Seconds)
	w := tabwriter.NewWriter(out, 0, 8, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "FAULT\tRUNS\tOPERATIONS\tUNKNOWN\tGAP s\tMEDIAN\tOF CHANGES s\tMEDIAN\tLOST\tILLEGAL\tFINDINGS\tPROBLEMS\t")
	for _, row := range r.Rows {
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t\n", row.Fault, row.Runs, row.Operations, row.Unknown,
			worst(row.Gaps), middle(row.Gaps), worst(row.ChangeGaps), middle(row.ChangeGaps),
			len(row.Lost), len(row.Illegal)+len(row.Undecided), len(row.Findings), len(row.Problems))
	}
	w.Flush()
	for _, row := range r.Rows {
		if row.LinesLost > 0 {
			fmt.Fprintf(out, "%s: losses of power have taken words of %d lines that were not durable\n", row.Fault, row.LinesLost)
		}
	}
	for _, s := range r.Skipped {
		fmt.Fprintln(out, "left out:", s)
	}
	for _, row := range r.Rows {
		if !row.OK() {
			fmt.Fprintln(out, row)
		}
	}
	verdict := "nothing acknowledged was lost, every history is linearizable, fsck is clean"
	if !r.OK() {
		verdict = "NOT ALL IS RIGHT"
	}
	fmt.Fprintln(out, strings.TrimSpace(verdict))
}
