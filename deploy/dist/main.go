// Command dist makes what is released: an archive for each platform with the program,
// its manual pages, completions, documentation and deployments; the Helm chart; a list
// of the parts it is made of (CycloneDX); and checksums of all.
//
//	go run ./deploy/dist -version v1.0.0 -out dist
//
// The same commit makes the same files.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
)

func main() {
	var r release
	platforms := flag.String("platforms", "linux/amd64,linux/arm64", "platforms to build for")
	flag.StringVar(&r.version, "version", "dev", "version")
	flag.StringVar(&r.out, "out", "dist", "folder for the files; emptied first")
	flag.Parse()
	r.platforms = strings.Split(*platforms, ",")
	if err := r.make(); err != nil {
		fmt.Fprintln(os.Stderr, "dist:", err)
		os.Exit(1)
	}
}

type release struct {
	version   string
	out       string
	platforms []string
	when      time.Time
	work      string // temporary
	man       string
	shells    string
	files     []string // made so far
}

func (r *release) make() (err error) {
	r.when = commitTime()
	if r.work, err = os.MkdirTemp("", "quarry-dist-"); err != nil {
		return err
	}
	defer os.RemoveAll(r.work)
	if err := os.RemoveAll(r.out); err != nil {
		return err
	}
	if err := os.MkdirAll(r.out, 0o755); err != nil {
		return err
	}
	own := runtime.GOOS + "/" + runtime.GOARCH
	host, err := r.build(own)
	if err != nil {
		return err
	}
	if err := r.pages(host); err != nil {
		return err
	}
	for _, p := range r.platforms {
		exe := host
		if p != own {
			if exe, err = r.build(p); err != nil {
				return err
			}
		}
		if err := r.platform(p, exe); err != nil {
			return err
		}
	}
	if err := r.chart(); err != nil {
		return err
	}
	if err := r.parts(host); err != nil {
		return err
	}
	return r.sums()
}

// commitTime is the time of the commit, so that archives do not tell when they were made.
func commitTime() time.Time {
	if s, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64); err == nil {
		return time.Unix(s, 0).UTC()
	}
	out, err := exec.Command("git", "log", "-1", "--format=%ct").Output()
	s, perr := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)
	if err != nil || perr != nil {
		return time.Unix(0, 0).UTC()
	}
	return time.Unix(s, 0).UTC()
}

// build makes the static program of a platform.
func (r *release) build(platform string) (string, error) {
	goos, goarch, ok := strings.Cut(platform, "/")
	if !ok {
		return "", fmt.Errorf("platform %q: want one such as linux/amd64", platform)
	}
	exe := filepath.Join(r.work, goos+"-"+goarch, "quarry")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w -X main.version="+r.version, "-o", exe, "./cmd/quarry")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+goos, "GOARCH="+goarch)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building for %s: %w\n%s", platform, err, out)
	}
	return exe, nil
}

// pages asks the program for its manual pages and completions.
func (r *release) pages(exe string) error {
	r.man, r.shells = filepath.Join(r.work, "man"), filepath.Join(r.work, "shells")
	if out, err := exec.Command(exe, "man", r.man).CombinedOutput(); err != nil {
		return fmt.Errorf("manual pages: %w\n%s", err, out)
	}
	if err := os.MkdirAll(r.shells, 0o755); err != nil {
		return err
	}
	for shell, name := range map[string]string{"bash": "quarry", "zsh": "_quarry", "fish": "quarry.fish"} {
		out, err := exec.Command(exe, "completion", shell).Output()
		if err != nil {
			return fmt.Errorf("completion for %s: %w", shell, err)
		}
		if err := os.WriteFile(filepath.Join(r.shells, name), out, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// platform packs the archive of one.
func (r *release) platform(platform, exe string) error {
	name := "quarry-" + r.version + "-" + strings.ReplaceAll(platform, "/", "-")
	return r.pack(name+".tar.gz", name, []source{
		{exe, "bin/quarry"}, {"LICENSE", "LICENSE"}, {"README.md", "README.md"}, {"docs", "docs"}, {"deploy", "deploy"},
		{r.man, "share/man/man1"}, {filepath.Join(r.shells, "quarry"), "share/bash-completion/completions/quarry"},
		{filepath.Join(r.shells, "_quarry"), "share/zsh/site-functions/_quarry"},
		{filepath.Join(r.shells, "quarry.fish"), "share/fish/vendor_completions.d/quarry.fish"},
	})
}

// chart packs the Helm chart.
func (r *release) chart() error {
	return r.pack("quarry-chart-"+r.version+".tgz", "quarry", []source{{"deploy/helm/quarry", ""}})
}
