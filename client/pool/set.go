package pool

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/quarrystore/quarry/client"
)

// Set is a pool set: a local part, which is the program's memory, and what it is replicated to. It is read from a file in the syntax of poolset(5):
//
//	PMEMPOOLSET
//	1GiB /mnt/pmem0/ledger        the program's memory
//	REPLICA
//	1GiB /mnt/pmem1/ledger        a mirror: another local part
//	REPLICA quarry: ledger        a pool of the cluster
//	REPLICA ops@far.org ledger    a pool of a cluster that this host reaches
type Set struct {
	Path    string // of the file, for errors
	Part    Part
	Mirrors []Part
	Pools   []string // names
	Remotes []RemotePool

	SSH, Agent string // as in Host
}

// Part is a file of a Set.
type Part struct {
	Path  string
	Bytes uint64 // of the file: a header of HeaderBytes, and the memory
}

// Limits of pool sets.
const (
	MaxSetBytes    = 64 << 10 // of the file
	MaxSetReplicas = 8        // beside the first part
	MinPartBytes   = 2 * HeaderBytes
	MaxPartBytes   = 1 << 40
)

// Cluster is the target of a REPLICA line that stands for the cluster of the Client. No host has that name.
const Cluster = "quarry:"

// ReadSet reads a pool set's file.
func ReadSet(path string) (*Set, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	s, err := ParseSet(path, f)
	if err != nil {
		return nil, err
	}
	if here, err := filepath.Abs(path); err == nil {
		for _, p := range s.parts() {
			if sameFile(p.Path, here) {
				return nil, fmt.Errorf("%w: %s: part %s is this file itself: name another file", client.ErrArgument, path, p.Path)
			}
		}
	}
	return s, nil
}

// sameFile says that two paths lead to one file.
func sameFile(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return a == b
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// parts are the Part and the Mirrors.
func (s *Set) parts() []Part { return append([]Part{s.Part}, s.Mirrors...) }

// check refuses a Set that ParseSet would not have made: one of a program.
func (s *Set) check() error {
	if pools := len(s.Pools) + len(s.Remotes); pools == 0 || pools+len(s.Mirrors) > MaxSetReplicas {
		return fmt.Errorf("%w: a pool set with %d mirrors and %d pools: want a pool, and at most %d of both", client.ErrArgument, len(s.Mirrors), pools, MaxSetReplicas)
	}
	for _, p := range s.parts() {
		if err := checkPartBytes(p.Bytes); err != nil {
			return fmt.Errorf("%w: %s: %w", client.ErrArgument, p.Path, err)
		}
		if p.Bytes != s.Part.Bytes || p.Path == s.Part.Path+Restoring {
			return fmt.Errorf("%w: mirror %s with %d bytes: it needs the %d bytes of %s, and another path than %s, which restore makes", client.ErrArgument, p.Path, p.Bytes, s.Part.Bytes, s.Part.Path, s.Part.Path+Restoring)
		}
	}
	return nil
}

func checkPartBytes(n uint64) error {
	switch {
	case n < MinPartBytes || n > MaxPartBytes:
		return fmt.Errorf("part of %d bytes: want %d to %d", n, MinPartBytes, uint64(MaxPartBytes))
	case n%HeaderBytes != 0:
		return fmt.Errorf("part of %d bytes: want a multiple of %d: write the size in KiB or MiB", n, HeaderBytes)
	}
	return nil
}

// ParseSet reads the text of a pool set. name stands for it in errors, which name the line, too; they are client.ErrArgument.
func ParseSet(name string, r io.Reader) (*Set, error) {
	b, err := io.ReadAll(io.LimitReader(r, MaxSetBytes+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if len(b) > MaxSetBytes {
		return nil, fmt.Errorf("%w: %s is longer than %d bytes: it is not a poolset file", client.ErrArgument, name, MaxSetBytes)
	}
	p := setParser{set: &Set{Path: name}, used: map[string]int{}}
	for text := range bytes.Lines(b) {
		p.line++
		if err := p.take(strings.TrimSpace(string(text))); err != nil {
			return nil, fmt.Errorf("%w: %s:%d: %w", client.ErrArgument, name, p.line, err)
		}
	}
	if err := p.end(); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", client.ErrArgument, name, err)
	}
	return p.set, nil
}

// setParser reads a pool set line by line.
type setParser struct {
	set    *Set
	line   int
	begun  bool           // PMEMPOOLSET was there
	want   string         // what the next line has to be: a part of this; "": not a part
	has    bool           // the first part was there
	single bool           // OPTION SINGLEHDR was there
	used   map[string]int // lines of paths and pools
}

const (
	firstPart  = "the program's memory"
	mirrorPart = "a mirror"
)

func (p *setParser) take(line string) error {
	if line == "" || line[0] == '#' {
		return nil
	}
	if !utf8.ValidString(line) || strings.ContainsFunc(line, func(r rune) bool { return r < ' ' && r != '\t' }) {
		return fmt.Errorf("%.40q is not text: give a poolset file", line)
	}
	word, rest, _ := strings.Cut(strings.ReplaceAll(line, "\t", " "), " ")
	rest = strings.TrimSpace(rest)
	switch {
	case !p.begun:
		if line != "PMEMPOOLSET" {
			return fmt.Errorf("the first line is %.40q, not PMEMPOOLSET: give a poolset file", line)
		}
		p.begun, p.want = true, firstPart
		return nil
	case word == "OPTION":
		return p.option(rest)
	case word == "REPLICA":
		return p.replica(rest)
	}
	return p.part(word, rest)
}

func (p *setParser) option(name string) error {
	switch {
	case name == "NOHDRS":
		return fmt.Errorf("OPTION NOHDRS: each local part has a header, by which Open finds out what a crash has left: remove the line")
	case name != "SINGLEHDR":
		return fmt.Errorf("option %.40q: want SINGLEHDR, which says what is always so", name)
	case p.single:
		return fmt.Errorf("a second OPTION SINGLEHDR: remove it")
	}
	p.single = true
	return nil
}

func (p *setParser) replica(rest string) error {
	if p.want != "" {
		return fmt.Errorf("REPLICA where a line SIZE PATH of %s is wanted", p.want)
	}
	if len(p.set.Mirrors)+len(p.set.Pools)+len(p.set.Remotes) == MaxSetReplicas {
		return fmt.Errorf("a REPLICA more than %d: remove some; a pool is replicated in the cluster by itself", MaxSetReplicas)
	}
	target, name, _ := strings.Cut(rest, " ")
	name = strings.TrimSpace(name)
	switch {
	case rest == "":
		p.want = mirrorPart
		return nil
	case filepath.IsAbs(name):
		p.want = mirrorPart
		return p.part(target, name) // in one line
	case target != Cluster && !strings.Contains(target, "@"):
		return fmt.Errorf("REPLICA %.80s: write REPLICA %s POOL, REPLICA USER@HOST POOL, or REPLICA and a line SIZE PATH", rest, Cluster)
	case name == "" || len(name) > MaxNameBytes || strings.Contains(name, " "):
		return fmt.Errorf("REPLICA %.80s wants the name of a pool, one word of at most %d bytes", target, MaxNameBytes)
	case target != Cluster:
		if err := (Host{Name: target}).check(); err != nil {
			return err
		}
		r := RemotePool{target, name}
		p.set.Remotes = append(p.set.Remotes, r)
		return p.use("pool "+r.String(), "pool "+r.String())
	}
	if err := p.use(name, "pool "+name); err != nil {
		return err
	}
	p.set.Pools = append(p.set.Pools, name)
	return nil
}

func (p *setParser) part(size, path string) error {
	n, err := parseSize(size)
	clean := filepath.Clean(path)
	switch {
	case err != nil:
		return err
	case p.want == "":
		return fmt.Errorf("a second part: each replica is one file: make one file system of several devices, as LVM does, or begin a mirror with REPLICA")
	case !filepath.IsAbs(path) || len(path) > 4095 || strings.HasSuffix(path, "/") || clean == "/" || clean != strings.TrimSpace(clean):
		return fmt.Errorf("part %.80q: want the path of a file, which begins with /", path)
	case checkPartBytes(n) != nil:
		return checkPartBytes(n)
	case p.has && clean == p.set.Part.Path+Restoring:
		return fmt.Errorf("mirror %s: restore makes the local part under that path: name another file", clean)
	case p.has && n != p.set.Part.Bytes:
		return fmt.Errorf("part of %d bytes, the first one has %d: make them the same", n, p.set.Part.Bytes)
	}
	part := Part{Path: clean, Bytes: n}
	if err := p.use(part.Path, "file "+part.Path); err != nil {
		return err
	}
	if p.want = ""; p.has {
		p.set.Mirrors = append(p.set.Mirrors, part)
	} else {
		p.set.Part, p.has = part, true
	}
	return nil
}

// use refuses what another line has named.
func (p *setParser) use(what, text string) error {
	if line := p.used[what]; line != 0 {
		return fmt.Errorf("%s is in line %d already: a replica of a memory is another memory", text, line)
	}
	p.used[what] = p.line
	return nil
}

func (p *setParser) end() error {
	switch {
	case !p.begun:
		return fmt.Errorf("it is empty: write a line PMEMPOOLSET, a line SIZE PATH and a line REPLICA %s POOL", Cluster)
	case p.want != "":
		return fmt.Errorf("it ends before the line SIZE PATH of %s", p.want)
	case len(p.set.Pools)+len(p.set.Remotes) == 0:
		return fmt.Errorf("it names no pool: add a line REPLICA %s POOL", Cluster)
	}
	return nil
}

// units of sizes, as poolset(5) has them.
var units = map[string]uint64{
	"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
	"kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
}

func parseSize(s string) (uint64, error) {
	if s == "AUTO" {
		return 0, fmt.Errorf("size AUTO is for device DAX, which is not served: make a file system on it (mode fsdax) and name a file")
	}
	digits := s[:len(s)-len(strings.TrimLeft(s, "0123456789"))]
	n, err := strconv.ParseUint(digits, 10, 64)
	unit := units[s[len(digits):]]
	if err != nil || unit == 0 || n > MaxPartBytes/unit {
		return 0, fmt.Errorf("size %.40q: want a number with an optional unit, such as 512MiB, up to 1TiB, or a line OPTION or REPLICA", s)
	}
	return n * unit, nil
}
