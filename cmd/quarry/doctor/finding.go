package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Level of a finding.
type Level string

const (
	OK      Level = "ok"
	Info    Level = "info"    // good to know
	Warning Level = "warning" // will hurt some day, or under load
	Error   Level = "error"   // does not work, or will lose a node
)

// Finding is one thing that was looked at.
type Finding struct {
	Check  string `json:"check"`
	Level  Level  `json:"level"`
	What   string `json:"what"`
	Remedy string `json:"remedy,omitempty"`
}

func ok(check, format string, args ...any) Finding {
	return Finding{check, OK, fmt.Sprintf(format, args...), ""}
}

func found(check string, l Level, remedy, format string, args ...any) Finding {
	return Finding{check, l, fmt.Sprintf(format, args...), remedy}
}

// Worst is the most serious level of a list; OK for an empty one.
func Worst(list []Finding) Level {
	worst := OK
	rank := map[Level]int{OK: 0, Info: 1, Warning: 2, Error: 3}
	for _, f := range list {
		if rank[f.Level] > rank[worst] {
			worst = f.Level
		}
	}
	return worst
}

// Host is a host as its /proc, /sys and /dev show it. Root is "/", or a folder with
// such trees for tests.
type Host struct{ Root string }

func (h Host) path(p string) string { return filepath.Join(h.Root, p) }

// text is a file's trimmed contents; "" if it cannot be read.
func (h Host) text(p string) string {
	b, err := os.ReadFile(h.path(p))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// number is a file's contents as one.
func (h Host) number(p string) (uint64, bool) {
	n, err := strconv.ParseUint(h.text(p), 10, 64)
	return n, err == nil
}

func (h Host) list(pattern string) []string {
	m, _ := filepath.Glob(h.path(pattern))
	return m
}

// field is the value of a line "NAME: VALUE" or "NAME VALUE" of a file.
func (h Host) field(p, name string) string {
	for _, line := range strings.Split(h.text(p), "\n") {
		if rest, found := strings.CutPrefix(line, name); found {
			return strings.TrimSpace(strings.TrimPrefix(rest, ":"))
		}
	}
	return ""
}

// kib is a field of /proc/meminfo in bytes.
func (h Host) kib(name string) uint64 {
	n, _ := strconv.ParseUint(strings.TrimSuffix(h.field("proc/meminfo", name), " kB"), 10, 64)
	return n << 10
}

// size is a number of bytes for people.
func size(n uint64) string {
	for _, u := range []struct {
		name string
		n    uint64
	}{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if n >= u.n {
			return fmt.Sprintf("%.4g %s", float64(n)/float64(u.n), u.name)
		}
	}
	return fmt.Sprintf("%d B", n)
}
