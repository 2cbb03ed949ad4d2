package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/alecthomas/kong"
)

type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"bash, zsh or fish."`
}

// candidate is one word that may follow the commands in path.
type candidate struct{ path, word, help string }

func candidates(n *kong.Node, inherited []*kong.Flag) []candidate {
	var out []candidate
	path := strings.Join(pathNames(n), " ")
	for _, c := range n.Children {
		out = append(out, candidate{path, c.Name, c.Help})
	}
	flags := append(inherited[:len(inherited):len(inherited)], n.Flags...)
	for _, f := range flags {
		out = append(out, candidate{path, "--" + f.Name, f.Help})
	}
	for _, c := range n.Children {
		out = append(out, candidates(c, flags)...)
	}
	return out
}

func (c *completionCmd) Run(a *app) error {
	words := candidates(a.parser.Model.Node, nil)
	switch c.Shell {
	case "bash":
		bash(a.out, words)
	case "zsh":
		fmt.Fprintln(a.out, "#compdef quarry\nautoload -U +X bashcompinit && bashcompinit")
		bash(a.out, words)
	case "fish":
		fish(a.out, words)
	}
	return nil
}

// commandWalk leaves in $path the commands among the words already typed.
const commandWalk = `_quarry() {
  local cur=${COMP_WORDS[COMP_CWORD]} path="" i w
  for ((i = 1; i < COMP_CWORD; i++)); do
    w="${path:+$path }${COMP_WORDS[i]}"
    [[ -n "${_quarry_words[$w]}" ]] && path=$w
  done
  COMPREPLY=($(compgen -W "${_quarry_words[${path:-.}]}" -- "$cur"))
  [[ ${#COMPREPLY[@]} == 0 && $cur != -* ]] && COMPREPLY=($(compgen -f -- "$cur"))
}
complete -F _quarry quarry`

func bash(w io.Writer, words []candidate) {
	var paths []string
	byPath := map[string][]string{}
	for _, c := range words {
		p := c.path
		if p == "" {
			p = "."
		}
		if byPath[p] == nil {
			paths = append(paths, p)
		}
		byPath[p] = append(byPath[p], c.word)
	}
	fmt.Fprintln(w, "# source <(quarry completion bash)\ndeclare -gA _quarry_words=(")
	for _, p := range paths {
		fmt.Fprintf(w, "  [%q]=%q\n", p, strings.Join(byPath[p], " "))
	}
	fmt.Fprintln(w, ")\n"+commandWalk)
}

func fish(w io.Writer, words []candidate) {
	fmt.Fprintln(w, "# quarry completion fish | source")
	for _, c := range words {
		cond := "__fish_use_subcommand"
		if c.path != "" {
			var parts []string
			for _, p := range strings.Fields(c.path) {
				parts = append(parts, "__fish_seen_subcommand_from "+p)
			}
			cond = strings.Join(parts, "; and ")
		}
		help := strings.ReplaceAll(c.help, "'", "")
		if flag, ok := strings.CutPrefix(c.word, "--"); ok {
			fmt.Fprintf(w, "complete -c quarry -n '%s' -l %s -d '%s'\n", cond, flag, help)
		} else {
			fmt.Fprintf(w, "complete -c quarry -n '%s' -a %s -d '%s'\n", cond, c.word, help)
		}
	}
}
