package deploytest

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func read(t *testing.T, parts ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(append([]string{root}, parts...)...))
	require.NoError(t, err)
	return string(b)
}

var execStart = regexp.MustCompile(`(?m)^ExecStart=(/usr/bin/quarry) ([a-z ]+) --config /etc/quarry/(\w+\.yml)$`)

func TestUnits(t *testing.T) {
	dir := t.TempDir()
	var units []string
	for _, name := range []string{"quarry-controller.service", "quarry-storage.service", "quarry-gateway.service", "quarry-pager@.service", "quarry-flight.service", "quarry-worker.service"} {
		text := read(t, "deploy", "systemd", name)
		m := execStart.FindStringSubmatch(text)
		require.NotNil(t, m, name)
		understood(t, name, append(strings.Fields(m[2]), "--config", filepath.Join(root, "deploy", "systemd", m[3]))...)
		unit := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(unit, []byte(strings.ReplaceAll(text, m[1], binary(t))), 0o644))
		units = append(units, unit)
	}
	for _, need := range []string{"LimitMEMLOCK=infinity", "Restart=on-failure", "OOMScoreAdjust=", "NoNewPrivileges=yes"} {
		require.Contains(t, read(t, "deploy", "systemd", "quarry-storage.service"), need)
	}
	analyze := tool(t, "systemd-analyze", "apt-get install systemd")
	// Manual pages are not installed here, and units that ours only orders itself by may be missing.
	out, err := exec.CommandContext(t.Context(), analyze, append([]string{"verify", "--man=no", "--recursive-errors=no"}, units...)...).CombinedOutput()
	require.NoError(t, err, string(out))
	for _, line := range strings.Split(string(out), "\n") {
		require.NotContains(t, line, dir, "systemd-analyze complains")
	}
}

// most is the exposure that systemd-analyze may find, in tenths; 3.5 and 4.1 before.
var most = map[string]int{"quarry-controller.service": 20, "quarry-storage.service": 20, "quarry-gateway.service": 20, "quarry-pager@.service": 20, "quarry-flight.service": 20, "quarry-worker.service": 21}

func TestUnitsAreConfined(t *testing.T) {
	analyze := tool(t, "systemd-analyze", "apt-get install systemd")
	for name, exposure := range most {
		unit := filepath.Join(root, "deploy", "systemd", name)
		out, err := exec.CommandContext(t.Context(), analyze, "security", "--offline=yes", "--threshold="+strconv.Itoa(exposure), unit).CombinedOutput()
		require.NoError(t, err, "%s", out)
		text := read(t, "deploy", "systemd", name)
		for _, need := range []string{"NoNewPrivileges=yes", "SystemCallFilter=@system-service", "CapabilityBoundingSet=\n", "AmbientCapabilities=\n"} {
			require.Contains(t, text, need, name)
		}
	}
}

func TestSysusers(t *testing.T) {
	sysusers := tool(t, "systemd-sysusers", "apt-get install systemd")
	dir := t.TempDir()
	conf := filepath.Join(dir, "usr", "lib", "sysusers.d")
	require.NoError(t, os.MkdirAll(conf, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(conf, "quarry.conf"), []byte(read(t, "deploy", "systemd", "quarry.sysusers")), 0o644))
	out, err := exec.CommandContext(t.Context(), sysusers, "--dry-run", "--root", dir).CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "quarry")
}

var option = regexp.MustCompile(`(?m)^( *)# ([a-z-]+: .*)$`)

// The example files are good as they are, and with every key that they only suggest.
func TestExampleConfigurations(t *testing.T) {
	for role, file := range map[string]string{"controller": "controller.yml", "storage": "storage.yml", "gateway redis": "gateway.yml", "pager": "pager.yml", "gateway flight": "flight.yml", "worker": "worker.yml"} {
		text := read(t, "deploy", "systemd", file)
		understood(t, file, append(strings.Fields(role), "--config", filepath.Join(root, "deploy", "systemd", file))...)
		all := filepath.Join(t.TempDir(), file)
		require.Greater(t, len(option.FindAllString(text, -1)), 3, file)
		require.NoError(t, os.WriteFile(all, []byte(option.ReplaceAllString(text, "$1$2")), 0o600))
		understood(t, file+" with all keys", append(strings.Fields(role), "--config", all)...)
	}
}
