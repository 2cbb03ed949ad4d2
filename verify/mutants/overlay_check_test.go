package mutants

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/verify/mutants/selected"
	"github.com/quarrystore/quarry/verify/testbinary"
)

const odd = "verify/mutants/testdata/odd"

func in(function, old, new string) edit { return edit{odd + "." + function, old, new} }

// TestEveryKindOfFunctionCanBeChanged: in one build, each process runs the mutant that it
// is told to run and no other.
func TestEveryKindOfFunctionCanBeChanged(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: compiles a program")
	}
	cases := []struct {
		edits []edit
		want  string
	}{
		{[]edit{in("(*pair).first", "return p.key", "var none K; return none")}, " 1 2 <nil> 3 a plain 1 1"},
		{[]edit{in("num.unnamed", "1", "7")}, "key 7 2 <nil> 3 a plain 1 1"},
		{[]edit{in("(*num).blank", "sum = b return", "err = fmt.Errorf(`late`)\nreturn")}, "key 1 0 late 3 a plain 1 1"},
		{[]edit{in("most", "max", "min")}, "key 1 2 <nil> 1 a plain 1 1"},
		{[]edit{in("says", `"plain"`, `"mad"`)}, "key 1 2 <nil> 3 a mad 1 1"},
		{[]edit{in("twice", "a = 1", "a = 4"), in("twice", "b = 1", "b = 5")}, "key 1 2 <nil> 3 a plain 4 5"},
	}
	o, dir := newOverlay(), t.TempDir()
	for i, c := range cases {
		require.NoError(t, o.add(i+1, &mutant{name: fmt.Sprint("case ", i+1), edits: c.edits}))
	}
	config, err := o.write(dir)
	require.NoError(t, err)
	binary := filepath.Join(dir, "odd")
	build := exec.Command("go", "build", "-overlay", config, "-o", binary, "./"+odd)
	build.Dir, build.Env = root, testbinary.ToolEnv()
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	play := func(number int) (stdout, stderr string) {
		cmd := exec.Command(binary)
		cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d", selected.Variable, number))
		var errs strings.Builder
		cmd.Stderr = &errs
		b, err := cmd.Output()
		require.NoError(t, err)
		return strings.TrimSuffix(string(b), "\n"), errs.String()
	}
	said, ran := play(0)
	require.Equal(t, "key 1 2 <nil> 3 a plain 1 1", said)
	require.Empty(t, ran)
	for i, c := range cases {
		said, ran = play(i + 1)
		require.Equal(t, c.want, said, "case %d", i+1)
		require.Equal(t, selected.Ran+"\n", ran)
	}
}

// TestWhatDoesNotApplyIsRefused: an edit names one function, and changes a text that is in
// it once.
func TestWhatDoesNotApplyIsRefused(t *testing.T) {
	for _, c := range []struct {
		edits []edit
		want  string
	}{
		{[]edit{in("gone", "a", "b")}, "0 functions are named " + odd + ".gone"},
		{[]edit{in("pair.first", "p.key", "p.val")}, "0 functions are named"}, // its receiver is a pointer
		{[]edit{in("says", `"loud"`, `"mad"`)}, "has its old text 0 times"},
		{[]edit{in("twice", "1", "2")}, "has its old text 2 times"},
		{[]edit{in("twice", "", "2")}, "has its old text 0 times"},
		{[]edit{in("twice", "a = 1", "a   = 1 // one")}, "is the same code as the old"},
		{[]edit{in("twice", "a = 1; b = 1", "a = 2"), in("twice", "b = 1", "b = 2")}, "overlap"},
		{[]edit{{"twice", "a = 1", "a = 2"}}, "is not the name of a function"},
		{[]edit{{"verify/nowhere.twice", "a = 1", "a = 2"}}, "nowhere"},
	} {
		require.ErrorContains(t, newOverlay().add(1, &mutant{edits: c.edits}), c.want)
	}
}
