package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/alecthomas/kong"
)

type manCmd struct {
	Dir string `arg:"" help:"Folder to write the pages to."`
}

// Run writes a manual page for the program and one for each command.
func (m *manCmd) Run(a *app) error {
	if err := os.MkdirAll(m.Dir, 0o755); err != nil {
		return err
	}
	top := a.parser.Model.Node
	pages := map[string]string{"quarry": manPage(top, "quarry", false)}
	for _, c := range top.Children {
		if !c.Hidden {
			pages["quarry-"+c.Name] = manPage(c, "quarry-"+c.Name, true)
		}
	}
	for name, text := range pages {
		if err := os.WriteFile(filepath.Join(m.Dir, name+".1"), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// roff escapes text for a manual page.
func roff(s string) string {
	s = strings.NewReplacer(`\`, `\e`, "-", `\-`).Replace(s)
	if strings.HasPrefix(s, ".") || strings.HasPrefix(s, "'") {
		s = `\&` + s
	}
	return s
}

func manPage(n *kong.Node, name string, deep bool) string {
	var b strings.Builder
	fmt.Fprintf(&b, ".TH %q 1 \"\" %q \"User Commands\"\n", strings.ToUpper(name), "quarry "+version)
	help := strings.TrimSuffix(n.Help, ".")
	if !deep {
		help = "a distributed, lock-free shared-memory store"
	}
	fmt.Fprintf(&b, ".SH NAME\n%s \\- %s\n", roff(name), roff(help))
	fmt.Fprintf(&b, ".SH SYNOPSIS\n.B %s\n", roff(strings.Replace(name, "-", " ", 1)))
	if len(n.Children) > 0 {
		b.WriteString(".I command\n")
	}
	b.WriteString("[\\fIoptions\\fR]\n")
	for _, p := range n.Positional {
		fmt.Fprintf(&b, ".I %s\n", roff(p.Name))
	}
	if n.Detail != "" {
		fmt.Fprintf(&b, ".SH DESCRIPTION\n%s\n", roff(n.Detail))
	}
	options(&b, ".SH OPTIONS\n", n)
	if len(n.Children) > 0 {
		b.WriteString(".SH COMMANDS\n")
		for _, c := range n.Children {
			command(&b, c, c.Name, deep)
		}
	}
	b.WriteString(".SH CONFIGURATION\nEvery option is also a variable (QUARRY_TOKEN, QUARRY_STORAGE_LISTEN) and a key of the YAML file that\n" +
		"\\-\\-config names. An option beats a variable beats the file. Keys that are no options are errors.\n")
	b.WriteString(".SH EXIT STATUS\n0 done, 1 not done, 2 usage, 3 outcome unknown, 4 not found, 5 conflict, 6 unreachable, 7 no space,\n8 damaged or findings, 130 interrupted.\n")
	b.WriteString(".SH SEE ALSO\n.BR quarry (1)\n")
	return b.String()
}

func command(b *strings.Builder, c *kong.Node, path string, deep bool) {
	if c.Hidden {
		return
	}
	fmt.Fprintf(b, ".TP\n.B %s", roff(path))
	for _, p := range c.Positional {
		fmt.Fprintf(b, " \\fI%s\\fB", roff(p.Name))
	}
	fmt.Fprintf(b, "\n%s\n", roff(c.Help))
	if !deep {
		return
	}
	if len(c.Flags) > 0 {
		b.WriteString(".RS\n")
		options(b, "", c)
		b.WriteString(".RE\n")
	}
	for _, sub := range c.Children {
		command(b, sub, path+" "+sub.Name, deep)
	}
}

func options(b *strings.Builder, heading string, n *kong.Node) {
	for _, f := range n.Flags {
		if f.Hidden {
			continue
		}
		b.WriteString(heading)
		heading = ""
		b.WriteString(".TP\n")
		if f.Short != 0 {
			fmt.Fprintf(b, "\\fB\\-%c\\fR, ", f.Short)
		}
		fmt.Fprintf(b, "\\fB\\-\\-%s\\fR", roff(f.Name))
		if !f.IsBool() {
			fmt.Fprintf(b, " \\fI%s\\fR", roff(f.FormatPlaceHolder()))
		}
		fmt.Fprintf(b, "\n%s\n", roff(f.Help))
	}
}
