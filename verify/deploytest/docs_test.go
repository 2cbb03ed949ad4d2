package deploytest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// asShell makes this test binary run a script in a network namespace of its own, where
// the ports that the pages name are free whatever runs on this host.
const asShell = "QUARRYTEST_SHELL"

// shell brings the namespace's loopback up and becomes a shell.
func shell(script string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING | unix.IFF_LOOPBACK)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		return err
	}
	return syscall.Exec(bash, []string{"bash", script}, os.Environ())
}

// fence is a fenced block with its language; those of lists are indented.
var fence = regexp.MustCompile("(?ms)^ *```(\\w*)\n(.*?)^ *```$")

// commands are the fenced sh blocks of a page.
func commands(t *testing.T, page string) []string {
	t.Helper()
	var out []string
	for _, m := range fence.FindAllStringSubmatch(read(t, "docs", page), -1) {
		if m[1] == "sh" {
			out = append(out, m[2])
		}
	}
	require.NotEmpty(t, out, page)
	return out
}

// stubs stand for programs that would change this host, or that are not here: each does
// the nearest thing that does not, so that wrong arguments are still found.
var stubs = map[string]string{
	"sudo":             `exec "$@"`,
	"systemctl":        `for u; do case $u in *.service) u=${u/@*./@.}; test -f "$ROOT/deploy/systemd/$u" || exit 1;; esac; done`,
	"systemd-sysusers": `test -f "$STAGE/usr/lib/sysusers.d/quarry.conf"`,
	"systemd-tmpfiles": `test "$1" = --create && test -f "$STAGE/usr/lib/tmpfiles.d/$2"`,
	"sysctl":           `test -e "/proc/sys/$(echo "${2%%=*}" | tr . /)"`,
	"make":             `exec /usr/bin/make -n -C "$ROOT" "$@"`,
	"sha256sum":        `test "$1" = -c`,
	"kubectl":          `exit 1`,
	// In the repository, with what it makes here.
	"go": `args=(); while [ $# -gt 0 ]; do case $1 in -o) args+=(-o "$PWD/$2"); shift;; *) args+=("$1");; esac; shift; done
exec "$GO" "${args[0]}" -C "$ROOT" "${args[@]:1}"`,
	// Into a staging folder, under the name given.
	"install": `args=(); files=(); while [ $# -gt 0 ]; do case $1 in -m) args+=(-m "$2"); shift;; -g) shift;; *) files+=("$1");; esac; shift; done
n=$((${#files[@]}-1)); to=$STAGE${files[n]}; case ${files[n]} in */) mkdir -p "$to";; *) mkdir -p "$(dirname "$to")";; esac
exec /usr/bin/install "${args[@]}" "${files[@]:0:n}" "$to"`,
	"docker": `case $1 in
build) while [ $# -gt 0 ]; do [ "$1" = -f ] && exec test -f "$2"; shift; done; exit 1;;
compose) command -v docker-compose >/dev/null || exit 0; shift; exec docker-compose "$1" "$2" config -q;;
*) exit 1;; esac`,
	"helm": `[ -n "$HELM" ] || exit 0
case $1 in install|upgrade) shift; exec "$HELM" template "$@" --kube-version 1.31.0 >/dev/null;; *) exit 1;; esac`,
}

// preludes are what a page takes for granted.
var preludes = map[string]string{
	// A tree like the repository's, with what make would have made.
	"INSTALL.md": `mkdir -p "$STAGE/tree/bin" "$STAGE/tree/dist"; cp -rs "$ROOT/deploy" "$STAGE/tree/"; cp -L "$(command -v quarry)" "$STAGE/tree/bin/quarry"; cd "$STAGE/tree"
quarry dev --insecure --nodes 1 & # the page sets a token for another cluster
until quarry status 2>/dev/null | grep -q open; do sleep 0.1; done`,
	"OPERATIONS.md": `quarry controller --listen 127.0.0.1:7420 --region-bytes 32MiB --lease 1s &
until quarry status >/dev/null 2>&1; do sleep 0.1; done
for n in n1 n2 n3; do quarry storage --name $n --domain /dc1/$n/$n --listen 127.0.0.1:0 --agent 127.0.0.1:0 --capacity 1GiB & done
until [ "$(quarry node list | grep -c ' up ')" = 3 ]; do sleep 0.1; done
quarry region create --replicas 2 --count 3
quarry slab alloc --data kept --replicas 2 --name kept`,
	"PROTOCOL.md": `quarry dev --nodes 1 &
until quarry status 2>/dev/null | grep -q open; do sleep 0.1; done`,
	"KV.md": `quarry dev --nodes 1 &
until quarry status 2>/dev/null | grep -q open; do sleep 0.1; done`,
	"FLIGHT.md": `quarry dev --nodes 2 &
until [ "$(quarry node list 2>/dev/null | grep -c ' up ')" = 2 ]; do sleep 0.1; done`,
	"SPACES.md": `quarry dev --nodes 2 &
until [ "$(quarry node list 2>/dev/null | grep -c ' up ')" = 2 ]; do sleep 0.1; done`,
	"POOLS.md": `quarry dev --nodes 2 &
until [ "$(quarry node list 2>/dev/null | grep -c ' up ')" = 2 ]; do sleep 0.1; done
printf '#!/bin/sh\nshift\nexec sh -c "$*"\n' >far; chmod +x far; export QUARRY_SSH=$PWD/far`,
	"C.md":    `ln -s "$ROOT/examples" examples`,
	"JOBS.md": `mkdir texts; printf 'the collector of garbage\n' > texts/a; printf 'a stone is a stone\n' > texts/b`,
	"TUNING.md": `quarry dev --nodes 2 --replicas 1 &
until quarry status 2>/dev/null | grep -q open; do sleep 0.1; done`,
}

// executed are the pages of which every command works, in their order.
var executed = []string{"INSTALL.md", "FIRST-HOUR.md", "OPERATIONS.md", "TUNING.md", "SECURITY.md", "PROTOCOL.md", "KV.md", "REDIS.md", "JOBS.md", "SPACES.md", "POOLS.md", "C.md", "FLIGHT.md"}

// unexecuted says of commands on other pages, and in blocks that are not sh, why they are not run.
var unexecuted = map[string]string{
	"BENCHMARKS.md":    "they measure for minutes; tests of the command run them with less to do",
	"RDMA.md":          "they install packages and need adapters; make test-rdma does both in a virtual machine",
	"OPERATIONS.md":    "blocks marked text need hosts of their own, or are run further down",
	"README.md":        "the same are in INSTALL.md and FIRST-HOUR.md",
	"models/README.md": "tests of verify/models run them",
}

// No page has commands that nobody has tried.
func TestEveryCommandIsTried(t *testing.T) {
	pages, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	require.NoError(t, err)
	command := regexp.MustCompile(`(?m)^(\$ |# )?(bin/quarry|quarry|make|go|apt-get|curl|redis-cli|docker|helm|sudo|spin) [a-z-]`)
	for _, page := range append(pages, filepath.Join(root, "README.md"), filepath.Join(root, "docs", "models", "README.md"), filepath.Join(root, "examples", "README.md")) {
		name, err := filepath.Rel(filepath.Join(root, "docs"), page)
		require.NoError(t, err)
		name = strings.TrimPrefix(name, "../")
		b, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, m := range fence.FindAllStringSubmatch(string(b), -1) {
			if m[1] == "sh" {
				require.Contains(t, executed, name, "%s has commands that are not run: add it to executed", name)
			} else if command.MatchString(m[2]) {
				require.NotEmpty(t, unexecuted[name], "%s has commands that are not run, and nothing says why:\n%s", name, m[2])
			}
		}
	}
	for name := range unexecuted {
		_, err := os.Stat(filepath.Join(root, "docs", name))
		if name != "README.md" {
			require.NoError(t, err)
		}
	}
}

// Every command of these pages works, in their order.
func TestPagesDoWhatTheySay(t *testing.T) {
	if testing.Short() {
		t.Skip("runs clusters; not with -short")
	}
	for _, page := range executed {
		t.Run(page, func(t *testing.T) { runPage(t, page) })
	}
}

func runPage(t *testing.T, page string) {
	blocks := commands(t, page)
	tool(t, "bash", "apt-get install bash")
	if page == "SECURITY.md" {
		tool(t, "openssl", "apt-get install openssl")
	}
	if page == "FIRST-HOUR.md" || page == "PROTOCOL.md" || page == "SPACES.md" {
		tool(t, "curl", "apt-get install curl")
	}
	if page == "REDIS.md" {
		tool(t, "redis-cli", "apt-get install redis-server")
	}
	if page == "C.md" {
		for name, remedy := range map[string]string{"cc": "apt-get install gcc libc6-dev", "pkg-config": "apt-get install pkgconf", "python3": "apt-get install python3"} {
			tool(t, name, remedy)
		}
	}
	abs, err := filepath.Abs(root)
	require.NoError(t, err)
	dir, err := os.MkdirTemp("", "qd") // short: sockets lie in it
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	bin, stage, work := filepath.Join(dir, "bin"), filepath.Join(dir, "stage"), filepath.Join(dir, "work")
	for _, d := range []string{bin, stage, work} {
		require.NoError(t, os.Mkdir(d, 0o755))
	}
	require.NoError(t, os.Symlink(binary(t), filepath.Join(bin, "quarry")))
	if page == "C.md" { // make is not run here; the build may take a minute, which is not part of the page's time
		run(t, root, "sh", "cmd/libquarry/build.sh", filepath.Join(work, "bin", "lib"))
	}
	for name, body := range stubs {
		require.NoError(t, os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/bash\n"+body+"\n"), 0o755))
	}
	script := "set -eu\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n" + preludes[page] + "\n"
	for i, b := range blocks {
		script += fmt.Sprintf("echo '== block %d' >&2\nset -x\n%s\n{ set +x; } 2>/dev/null\n", i+1, b)
	}
	file := filepath.Join(dir, "script")
	require.NoError(t, os.WriteFile(file, []byte(script), 0o600))
	helm, _ := exec.LookPath("helm")
	self, err := os.Executable()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, self)
	cmd.Dir = work
	cmd.Env = []string{asShell + "=" + file, "PATH=" + bin + ":" + os.Getenv("PATH"), "HOME=" + work, "TMPDIR=" + dir, "ROOT=" + abs, "STAGE=" + stage, "HELM=" + helm, "PYTHONDONTWRITEBYTECODE=1"}
	if page == "JOBS.md" || page == "C.md" || page == "SPACES.md" || page == "POOLS.md" || page == "FLIGHT.md" { // builds programs, from what is on this host
		goTool := tool(t, "go", "it is needed to build plugins")
		cmd.Env = append(cmd.Env, "GO="+goTool, "GOPROXY=off", "GOTOOLCHAIN=local", "CGO_ENABLED=0")
		for _, name := range []string{"GOCACHE", "GOMODCACHE", "GOPATH", "GOFLAGS"} { // what other tests have built serves here too
			cmd.Env = append(cmd.Env, name+"="+strings.TrimSpace(run(t, root, goTool, "env", name)))
		}
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Setpgid: true}
	if os.Getuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Start()
	if errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EINVAL) {
		t.Skip("no right to make a network namespace: ", err)
	}
	require.NoError(t, err)
	require.NoError(t, cmd.Wait(), "%s", out.String())
}
