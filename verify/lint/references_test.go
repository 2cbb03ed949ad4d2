package lint

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	reference = regexp.MustCompile(`\b([A-Z][A-Z-]+\.md)#([\w-]+)`)
	link      = regexp.MustCompile(`\]\(([^)#:\s]+)(?:#[\w-]+)?\)`)
	// A section's number changes when a section is added: references name an anchor.
	numbered = regexp.MustCompile(`\b(?:DESIGN|RATIONALE|PROTOCOL|HAZARDS)(?:\.md)?,? (?:§|sections? )?\d`)
	heading  = regexp.MustCompile(`(?m)^#{1,6} +(.+?) *$`)
)

// TestReferencesResolve: every FILE.md#anchor in code and documents names a heading, every
// relative link of a document names a file, and none counts sections.
func TestReferencesResolve(t *testing.T) {
	root := filepath.Join("..", "..")
	out, err := exec.Command("git", "-C", root, "ls-files", "-co", "--exclude-standard").Output()
	if err != nil {
		t.Skip("not a git checkout: ", err)
	}
	names := strings.Fields(string(out))
	pages := map[string]map[string]bool{} // base name -> anchors
	texts := map[string]string{}
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join(root, name))
		if err != nil || bytes.IndexByte(b[:min(len(b), 8000)], 0) >= 0 || filepath.Base(name) == "references_test.go" {
			continue
		}
		texts[name] = string(b)
		if page := filepath.Base(name); strings.HasSuffix(page, ".md") && page != "README.md" {
			require.NotContains(t, pages, page, "two documents have one name: references could not tell them apart")
			pages[page] = anchors(string(b))
		}
	}
	for name, text := range texts {
		for i, line := range strings.Split(text, "\n") {
			for _, m := range reference.FindAllStringSubmatch(line, -1) {
				if found, known := pages[m[1]]; m[1] != "README.md" && (!known || !found[m[2]]) {
					t.Errorf("%s:%d: %s has no heading #%s", name, i+1, m[1], m[2])
				}
			}
			if m := numbered.FindString(line); m != "" {
				t.Errorf("%s:%d: %q counts sections: name the heading, such as docs/DESIGN.md#failover", name, i+1, m)
			}
			if !strings.HasSuffix(name, ".md") {
				continue
			}
			for _, m := range link.FindAllStringSubmatch(line, -1) {
				if _, err := os.Stat(filepath.Join(root, filepath.Dir(name), m[1])); err != nil {
					t.Errorf("%s:%d: link to %s, which is no file", name, i+1, m[1])
				}
			}
		}
	}
}

// anchors lists the anchors of a page as code hosts make them from its headings.
func anchors(text string) map[string]bool {
	set := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(text, -1) {
		var b strings.Builder
		for _, r := range strings.ToLower(m[1]) {
			switch {
			case r == ' ', r == '-':
				b.WriteByte('-')
			case r == '_', r >= 'a' && r <= 'z', r >= '0' && r <= '9':
				b.WriteRune(r)
			}
		}
		set[b.String()] = true
	}
	return set
}

// TestMapIsTrue: every path in backquotes on the page ARCHITECTURE.md exists.
func TestMapIsTrue(t *testing.T) {
	root := filepath.Join("..", "..")
	page, err := os.ReadFile(filepath.Join(root, "ARCHITECTURE.md"))
	require.NoError(t, err)
	paths := regexp.MustCompile("`([a-z]+(?:/[\\w.-]*)+)`").FindAllStringSubmatch(string(page), -1)
	require.Greater(t, len(paths), 30)
	for _, m := range paths {
		if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
			t.Errorf("ARCHITECTURE.md names %s, which does not exist", m[1])
		}
	}
}
