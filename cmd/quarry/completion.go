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
type candidate struct {
	path, word, help string // no word: the values of the commands' argument
	values           bool   // of the flag are known: see completeCmd
}

// known says whether completeCmd knows values.
func known(v *kong.Value) bool { return v.Enum != "" || v.Tag.Get("complete") != "" }

// candidates are the words that may follow each command, with those of its subcommands. A flag of a command may be
// given behind each of its subcommands, so they inherit it.
func candidates(n *kong.Node, inherited []*kong.Flag) []candidate {
	var out []candidate
	path := strings.Join(pathNames(n), " ")
	if len(n.Positional) > 0 && known(n.Positional[0]) {
		out = append(out, candidate{path: path})
	}
	for _, c := range n.Children {
		if !c.Hidden {
			out = append(out, candidate{path: path, word: c.Name, help: c.Help})
		}
	}
	flags := append(inherited[:len(inherited):len(inherited)], n.Flags...)
	for _, f := range flags {
		out = append(out, candidate{path, "--" + f.Name, f.Help, known(f.Value)})
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

// commandWalk leaves in $path the commands among the words already typed. Behind a flag or
// a command that takes a value it asks the binary, which knows enums and asks the cluster.
const commandWalk = `_quarry() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} path="" i w values=""
  for ((i = 1; i < COMP_CWORD; i++)); do
    w="${path:+$path }${COMP_WORDS[i]}"
    [[ -n "${_quarry_words[$w]}" ]] && path=$w
  done
  if [[ $prev == -* && $cur != -* ]]; then
    values=$("${COMP_WORDS[0]}" complete-values "$path" -- "$prev" 2>/dev/null)
  elif [[ $cur != -* ]]; then
    values=$("${COMP_WORDS[0]}" complete-values "$path" 2>/dev/null)
  fi
  [[ -z $values || $prev != -* ]] && values="$values ${_quarry_words[${path:-.}]}"
  COMPREPLY=($(compgen -W "$values" -- "$cur"))
  [[ ${#COMPREPLY[@]} == 0 && $cur != -* ]] && COMPREPLY=($(compgen -f -- "$cur"))
}
complete -F _quarry quarry`

// bash writes a script with the words of each command; it asks quarry complete-values for values.
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
		if c.word != "" {
			byPath[p] = append(byPath[p], c.word)
		}
	}
	fmt.Fprintln(w, "# source <(quarry completion bash)\ndeclare -gA _quarry_words=(")
	for _, p := range paths {
		fmt.Fprintf(w, "  [%q]=%q\n", p, strings.Join(byPath[p], " "))
	}
	fmt.Fprintln(w, ")\n"+commandWalk)
}

// fish writes one complete command for each word.
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
		flag, isFlag := strings.CutPrefix(c.word, "--")
		switch {
		case c.word == "":
			fmt.Fprintf(w, "complete -c quarry -n '%s' -a '(quarry complete-values \"%s\" 2>/dev/null)'\n", cond, c.path)
		case isFlag && c.values:
			fmt.Fprintf(w, "complete -c quarry -n '%s' -l %s -x -a '(quarry complete-values \"%s\" -- --%s 2>/dev/null)' -d '%s'\n", cond, flag, c.path, flag, help)
		case isFlag:
			fmt.Fprintf(w, "complete -c quarry -n '%s' -l %s -d '%s'\n", cond, flag, help)
		default:
			fmt.Fprintf(w, "complete -c quarry -n '%s' -a %s -d '%s'\n", cond, c.word, help)
		}
	}
}
