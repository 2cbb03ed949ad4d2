package deploytest

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// The npm packages that make tools installs have an exact version and a digest each, and come from the registry of the host's configuration.
func TestPackagesOfClientsArePinned(t *testing.T) {
	type pack struct {
		Version, Integrity, Resolved string
		Dependencies                 map[string]string
	}
	read := func(file string, to any) {
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(b, to), file)
	}
	exact := regexp.MustCompile(`^[0-9]+\.[0-9]+\.[0-9]+(-[a-z0-9.]+)?$`)
	for _, name := range []string{"flight", "redis"} {
		folder := filepath.Join("../../.ci/npm", name)
		var want pack
		var lock struct{ Packages map[string]pack }
		read(filepath.Join(folder, "package.json"), &want)
		read(filepath.Join(folder, "package-lock.json"), &lock)
		require.NotEmpty(t, want.Dependencies)
		require.Equal(t, want.Dependencies, lock.Packages[""].Dependencies)
		delete(lock.Packages, "")
		for name, version := range want.Dependencies {
			require.Regexp(t, exact, version)
			require.Equal(t, version, lock.Packages["node_modules/"+name].Version)
		}
		for name, p := range lock.Packages {
			require.Regexp(t, exact, p.Version, name)
			require.Regexp(t, "^sha512-", p.Integrity, name)
			require.Empty(t, p.Resolved, name)
		}
	}
}
