package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/quarrystore/quarry/cmd/quarry/doctor"
	"github.com/quarrystore/quarry/fsck"
	"github.com/quarrystore/quarry/internal/userdir"
	"github.com/quarrystore/quarry/proto/quarrypb"
	"github.com/quarrystore/quarry/proto/quarrypb/quarrypbconnect"
)

type supportCmd struct {
	Collect supportCollectCmd `cmd:"" help:"Write tables, status, metrics, findings and logs into one archive, without secrets."`
}

type supportCollectCmd struct {
	Out     string   `short:"o" placeholder:"FILE" help:"Archive to write; default quarry-support-TIME.tar.gz."`
	Metrics []string `placeholder:"URL" help:"Metrics to fetch, comma separated; default the usual ports of this host."`
	Log     []string `placeholder:"FILE" help:"Log files whose ends are copied, beside the journal of the quarry units."`
	Conf    []string `default:"/etc/quarry" placeholder:"DIR" help:"Folders whose *.yml files are copied, without their secrets."`
	Fsck    bool     `help:"Also check the whole structure, which reads every slab."`
	Since   string   `default:"24 hours ago" help:"How far back the journal is copied."`
}

// Help is shown by --help.
func (*supportCollectCmd) Help() string {
	return "Example: quarry support collect --log /var/log/quarry.log. The archive has no object's contents, names or keys; read it before you hand it on."
}

const (
	maxPartBytes    = 16 << 20 // of a file in the archive: the end of it is kept
	maxArchiveParts = 256
	fetchPatience   = 5 * time.Second
)

var usualMetrics = []string{"http://127.0.0.1:9420/metrics", "http://127.0.0.1:9421/metrics", "http://127.0.0.1:9422/metrics"}

// bundle is the archive in the making.
type bundle struct {
	tar     *tar.Writer
	blot    blotter
	top     string
	when    time.Time
	parts   []string
	failed  []string
	written error
}

// add takes a part: what get returns, with secrets blotted out. What cannot be had is
// listed, not fatal: an archive is most needed when much is broken.
func (b *bundle) add(name string, get func() ([]byte, error)) {
	if len(b.parts) >= maxArchiveParts {
		b.failed = append(b.failed, name+": the archive is full")
		return
	}
	data, err := get()
	if err != nil {
		b.failed = append(b.failed, name+": "+oneLine(err))
		if len(data) == 0 {
			return
		}
	}
	if n := len(data) - maxPartBytes; n > 0 {
		data = append([]byte(fmt.Sprintf("[%d bytes before this are left out]\n", n)), data[n:]...)
	}
	data = b.blot.out(data)
	b.parts = append(b.parts, name)
	err = b.tar.WriteHeader(&tar.Header{Name: path.Join(b.top, name), Size: int64(len(data)), Mode: 0o600, ModTime: b.when})
	if err == nil {
		_, err = b.tar.Write(data)
	}
	b.written = errors.Join(b.written, err)
}

func (b *bundle) json(name string, get func() (any, error)) {
	b.add(name, func() ([]byte, error) {
		v, err := get()
		if err != nil {
			return nil, err
		}
		return json.MarshalIndent(v, "", "  ")
	})
}

// supportReport is what was written.
type supportReport struct {
	File   string   `json:"file"`
	Bytes  int64    `json:"size_bytes"`
	Parts  []string `json:"parts"`
	Failed []string `json:"not_had"`
}

// Run writes the archive. A part that cannot be read is listed in it and does not end the command.
func (s *supportCollectCmd) Run(ctx context.Context, a *app) (err error) {
	now := time.Now()
	top := "quarry-support-" + now.UTC().Format("20060102-150405")
	if s.Out == "" {
		s.Out = top + ".tar.gz"
	}
	f, err := os.OpenFile(s.Out, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return usagef("archive: %w", err)
	}
	z := gzip.NewWriter(f)
	b := &bundle{tar: tar.NewWriter(z), top: top, when: now, blot: newBlotter(a.cli.Token, os.Environ())}
	var conf []string
	for _, dir := range s.Conf {
		files, _ := filepath.Glob(filepath.Join(dir, "*.yml"))
		conf = append(conf, files...)
	}
	for _, file := range conf { // first, so that no part tells what another hides
		if text, err := os.ReadFile(file); err == nil {
			b.blot.learn(text)
		}
	}
	s.cluster(ctx, a, b)
	s.host(a, b, conf)
	s.logs(ctx, b)
	b.add("not-had.txt", func() ([]byte, error) { return []byte(strings.Join(b.failed, "\n") + "\n"), nil })
	err = errors.Join(b.written, b.tar.Close(), z.Close(), f.Close())
	if err == nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = os.Remove(s.Out)
		return err
	}
	r := supportReport{File: s.Out, Parts: b.parts, Failed: append([]string{}, b.failed...)}
	if st, err := os.Stat(s.Out); err == nil {
		r.Bytes = st.Size()
	}
	return a.print(r, func(w io.Writer) {
		fmt.Fprintf(w, "%s: %d parts, %s\n", r.File, len(r.Parts), bytesText(uint64(r.Bytes)))
		for _, x := range r.Failed {
			fmt.Fprintf(w, "not had: %s\n", x)
		}
		fmt.Fprintln(w, "secrets are blotted out; read it all the same before you hand it on")
	})
}

// cluster asks the controllers.
func (s *supportCollectCmd) cluster(ctx context.Context, a *app, b *bundle) {
	b.json("status.json", func() (any, error) { return a.status(ctx) })
	b.json("sessions.json", func() (any, error) {
		r, err := ask(ctx, a, &quarrypb.ListSessionsRequest{}, quarrypbconnect.ControllerClient.ListSessions)
		if err != nil {
			return nil, err
		}
		return append([]*quarrypb.Session{}, r.Sessions...), nil
	})
	b.json("doctor.json", func() (any, error) { return (&doctorCmd{}).findings(ctx, a), nil })
	if s.Fsck {
		b.json("fsck.json", func() (any, error) {
			return checked(fsck.Cluster(ctx, a.fsckConfig(nil, nil, nil)))
		})
	}
	urls := s.Metrics
	if len(urls) == 0 {
		urls = usualMetrics
	}
	for _, u := range urls {
		name := strings.NewReplacer("http://", "", "https://", "", "/", "-", ":", "-").Replace(u)
		b.add("metrics/"+name+".txt", func() ([]byte, error) { return fetch(ctx, a, u) })
	}
}

// fetch reads the metrics of one process, at most maxPartBytes of them.
func fetch(ctx context.Context, a *app, u string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchPatience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u, nil)
	if err != nil {
		return nil, err
	}
	h := &http.Client{Transport: userdir.Transport(&http.Transport{TLSClientConfig: a.tls, DialContext: (&net.Dialer{Timeout: time.Second}).DialContext, DisableKeepAlives: true})}
	res, err := h.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s answers %s", u, res.Status)
	}
	return io.ReadAll(io.LimitReader(res.Body, maxPartBytes))
}

// host describes the machine.
func (s *supportCollectCmd) host(a *app, b *bundle, conf []string) {
	b.add("machine.txt", func() ([]byte, error) { return []byte(machine() + "\n"), nil })
	b.json("host.json", func() (any, error) { return doctor.Host{Root: "/"}.Check(doctor.Plan{RDMA: a.cli.RDMA}), nil })
	b.add("environment.txt", func() ([]byte, error) {
		var mine []string
		for _, e := range os.Environ() {
			if strings.HasPrefix(e, "QUARRY_") {
				mine = append(mine, e)
			}
		}
		slices.Sort(mine)
		return []byte(strings.Join(mine, "\n") + "\n"), nil
	})
	for _, file := range []string{"/proc/meminfo", "/proc/mounts", "/proc/self/limits", "/proc/cpuinfo", "/proc/net/dev", "/etc/os-release"} {
		b.add("host"+file, func() ([]byte, error) { return os.ReadFile(file) })
	}
	for _, file := range conf {
		b.add(path.Join("conf", filepath.ToSlash(file)), func() ([]byte, error) { return os.ReadFile(file) })
	}
}

// logs takes the ends of logs.
func (s *supportCollectCmd) logs(ctx context.Context, b *bundle) {
	for _, file := range s.Log {
		b.add(path.Join("log", filepath.ToSlash(file)), func() ([]byte, error) { return tailOf(file) })
	}
	if _, err := exec.LookPath("journalctl"); err != nil {
		b.failed = append(b.failed, "journal: there is no journalctl")
		return
	}
	b.add("log/journal.txt", func() ([]byte, error) {
		ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
		defer cancel()
		return exec.CommandContext(ctx, "journalctl", "--no-pager", "-o", "short-iso-precise", "--since", s.Since, "-u", "quarry-*").Output()
	})
}

// tailOf is the end of a log, up to the limit of a part.
func tailOf(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", file)
	}
	if n := st.Size() - maxPartBytes; n > 0 {
		if _, err := f.Seek(n, io.SeekStart); err != nil {
			return nil, err
		}
	}
	return io.ReadAll(io.LimitReader(f, maxPartBytes))
}

// blotter removes secrets from text.
type blotter struct{ secrets [][]byte }

// minSecret is the shortest word that is blotted out wherever it stands: a shorter one
// would blot out half the archive, and protects nothing.
const minSecret = 4

// newBlotter knows the secrets of this process, which must not get into the archive.
func newBlotter(token string, environ []string) blotter {
	var b blotter
	b.add(token)
	for _, e := range environ {
		if k, v, ok := strings.Cut(e, "="); ok && secretKey(k) {
			b.add(v)
		}
	}
	return b
}

// add makes a text a secret to be removed.
func (b *blotter) add(s string) {
	if len(s) >= minSecret {
		b.secrets = append(b.secrets, []byte(s))
	}
}

// secretKey says whether the value of a setting with this name is a secret.
func secretKey(k string) bool {
	k = strings.ToLower(k)
	return strings.Contains(k, "token") || strings.Contains(k, "password") || strings.Contains(k, "secret") || strings.HasSuffix(k, "apikey")
}

var blot = []byte("[blotted out]")

// keyed finds values behind what sounds like a secret's name: token: x, TOKEN=x, --token x.
var keyed = regexp.MustCompile(`(?i)((?:token|password|secret)["']?\s*[:=]\s*|--(?:token|password|secret)[ =])("[^"\n]*"|'[^'\n]*'|[^\s"',}]+)`)

// inURL finds a user and a password in a URL.
var inURL = regexp.MustCompile(`(://)[^/\s@"']+@`)

// out is text without secrets: those that are known, anywhere, and what looks like one.
func (b *blotter) out(text []byte) []byte {
	for _, s := range b.secrets {
		text = bytes.ReplaceAll(text, s, blot)
	}
	text = keyed.ReplaceAll(text, append([]byte("$1"), blot...))
	text = inURL.ReplaceAll(text, append(append([]byte("$1"), blot...), '@'))
	if bytes.Contains(text, []byte("PRIVATE KEY")) {
		return blot
	}
	return text
}

// learn adds the secrets of a configuration file, however YAML writes them.
func (b *blotter) learn(file []byte) {
	var v any
	if yaml.Unmarshal(file, &v) == nil {
		b.walk("", v)
	}
}

// walk adds the secrets in a decoded configuration.
func (b *blotter) walk(key string, v any) {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			b.walk(k, x)
		}
	case []any:
		for _, x := range v {
			b.walk(key, x)
		}
	default:
		if secretKey(key) {
			b.add(fmt.Sprint(v))
		}
	}
}
