package wasmcheck

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
)

// A script is a part of the specification's test suite, as wazero's module brings it.
type script struct {
	Commands []command
}

type command struct {
	Type       string // module, register, action, assert_return ...
	Line       int
	Name       string // of a module, within the script
	As         string // name under which others import it
	Filename   string
	ModuleType string `json:"module_type"` // binary or text
	Action     struct {
		Type, Module, Field string
		Args                []value
	}
}

type value struct {
	Type  string
	Value any // a string, or strings of a vector's lanes
}

// A world is a runtime with the modules of a script, as they are or rewritten.
type world struct {
	r         wazero.Runtime
	rewritten bool
	named     map[string]api.Module
	last      api.Module
}

func newWorld(t *testing.T, spectest []byte, rewritten bool) *world {
	w := &world{r: wazero.NewRuntimeWithConfig(t.Context(), wazero.NewRuntimeConfigInterpreter()), rewritten: rewritten, named: map[string]api.Module{}}
	t.Cleanup(func() { _ = w.r.Close(context.Background()) })
	_, err := w.r.NewHostModuleBuilder("host").NewFunctionBuilder().WithFunc(func() {}).Export("check").Instantiate(t.Context())
	require.NoError(t, err)
	_, err = w.r.InstantiateWithConfig(t.Context(), spectest, wazero.NewModuleConfig().WithName("spectest"))
	require.NoError(t, err)
	return w
}

// load instantiates a module, with the name under which the script registers it later.
func (w *world) load(ctx context.Context, wasm []byte, name, as string) error {
	if w.rewritten {
		var err error
		if wasm, err = Insert(wasm, "host", "check"); err != nil {
			return err
		}
	}
	m, err := w.r.InstantiateWithConfig(ctx, wasm, wazero.NewModuleConfig().WithName(as))
	if err == nil {
		w.last, w.named[name] = m, m
	}
	return err
}

// do calls a function or reads a global, and says what came of it.
func (w *world) do(ctx context.Context, c *command) string {
	m := w.last
	if c.Action.Module != "" {
		m = w.named[c.Action.Module]
	}
	if m == nil {
		return "no module"
	}
	if c.Action.Type == "get" {
		if g := m.ExportedGlobal(c.Action.Field); g != nil {
			return fmt.Sprint(g.Get())
		}
		return "no global"
	}
	f := m.ExportedFunction(c.Action.Field)
	if f == nil {
		return "no function"
	}
	var args []uint64
	for _, a := range c.Action.Args {
		text, _ := a.Value.(string)
		v, err := strconv.ParseUint(text, 10, 64)
		if err != nil { // a vector or a special value: both worlds get the same
			v = 1
		}
		args = append(args, v)
		if a.Type == "v128" {
			args = append(args, 1<<40)
		}
	}
	results, err := f.Call(ctx, args...)
	if err != nil {
		reason, _, _ := strings.Cut(err.Error(), "\n") // behind it come the names and numbers of functions
		return "error: " + reason
	}
	for i, kind := range f.Definition().ResultTypes() {
		if kind == api.ValueTypeExternref || kind == 0x70 { // addresses
			results[i] = min(results[i], 1)
		}
	}
	return fmt.Sprint(results)
}

// TestSpecificationRunsTheSame: every module of the specification's tests that the runtime takes does the same when it
// is rewritten, call by call.
func TestSpecificationRunsTheSame(t *testing.T) {
	if testing.Short() {
		t.Skip("calls 48 000 functions, one after the other; not with -short")
	}
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/tetratelabs/wazero").Output()
	require.NoError(t, err)
	root := filepath.Join(strings.TrimSpace(string(out)), "internal/integration_test/spectest")
	spectest, err := os.ReadFile(filepath.Join(root, "testdata/spectest.wasm"))
	require.NoError(t, err)
	modules, calls := 0, 0
	require.NoError(t, filepath.WalkDir(filepath.Join(root, "v2/testdata"), func(path string, _ os.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".json" {
			return err
		}
		var s script
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(b, &s))
		plain, rewritten := newWorld(t, spectest, false), newWorld(t, spectest, true)
		for i := range s.Commands {
			c := &s.Commands[i]
			at := fmt.Sprintf("%s, line %d", filepath.Base(path), c.Line)
			switch {
			case c.Filename != "" && c.ModuleType != "text":
				wasm, err := os.ReadFile(filepath.Join(filepath.Dir(path), c.Filename))
				require.NoError(t, err)
				name := s.registered(i)
				err = plain.load(t.Context(), wasm, c.Name, name)
				again := rewritten.load(t.Context(), wasm, c.Name, name)
				require.Equal(t, err == nil, again == nil, "%s: %v, rewritten: %v", at, err, again)
				modules++
			case c.Action.Field != "":
				require.Equal(t, plain.do(t.Context(), c), rewritten.do(t.Context(), c), at)
				calls++
			}
		}
		return nil
	}))
	t.Logf("%d modules, %d calls", modules, calls)
	require.Greater(t, modules, 1000)
	require.Greater(t, calls, 40_000)
}

// registered is the name under which the module of a command is registered before the next one, if it is.
func (s *script) registered(at int) string {
	for _, c := range s.Commands[at+1:] {
		switch {
		case c.Type == "register" && (c.Name == "" || c.Name == s.Commands[at].Name):
			return c.As
		case c.Type == "module" && s.Commands[at].Name == "":
			return ""
		}
	}
	return ""
}
