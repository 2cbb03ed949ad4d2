package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
	"go.yaml.in/yaml/v3"
)

const defaultConfigPath = "/etc/quarry/quarry.yml"

// configPath finds the configuration file before flags are parsed, which need it.
func configPath(args []string) string {
	for i, a := range args {
		switch {
		case a == "--":
			return os.Getenv("QUARRY_CONFIG")
		case (a == "--config" || a == "-c") && i+1 < len(args):
			return args[i+1]
		case strings.HasPrefix(a, "--config="):
			return strings.TrimPrefix(a, "--config=")
		}
	}
	return os.Getenv("QUARRY_CONFIG")
}

// configFile gives flags the values of a file. Flags of commands stand in a
// section of the command's name:
//
//	controller-url flags at the top:    token: secret
//	of `quarry storage`:                storage: {name: n1, listen: 10.0.0.1:7421}
//
// The list of controllers has a second name, controllers, for files that also have
// the section of `quarry controller`:
//
//	controllers: [http://10.0.0.1:7420, http://10.0.0.2:7420]
//	controller: {listen: 10.0.0.1:7420}
//
// Every key must be a flag: a misspelt one is an error, not a default.
type configFile struct {
	path   string
	values map[string]any
}

// loadConfig reads the configuration file. Only the file of --config has to exist. A key that no flag has is an
// error.
func loadConfig(path string, model *kong.Application) (*configFile, error) {
	given := path != ""
	if !given {
		path = defaultConfigPath
	}
	b, err := os.ReadFile(path)
	if !given && errors.Is(err, fs.ErrNotExist) {
		return &configFile{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	c := &configFile{path: path}
	if err := yaml.Unmarshal(b, &c.values); err != nil {
		return nil, fmt.Errorf("configuration %s: %s", path, strings.TrimPrefix(oneLine(err), "yaml: "))
	}
	return c, c.check(c.values, model.Node, "")
}

// check refuses keys that are neither flags nor commands.
func (c *configFile) check(values map[string]any, node *kong.Node, at string) error {
	keys := make([]string, 0, len(values))
	for k := range values {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, key := range keys {
		sub := child(node, key)
		section, isSection := values[key].(map[string]any)
		switch {
		case isSection && sub != nil:
			if err := c.check(section, sub, at+key+"."); err != nil {
				return err
			}
		case !isSection && hasFlag(node, key):
			if other := otherName(node, key, values); other != "" {
				return fmt.Errorf("configuration %s: %q and %q are two names of one thing: keep one", c.path, at+key, at+other)
			}
		default:
			return fmt.Errorf("configuration %s: unknown key %q; keys are the names of flags, see quarry %s--help", c.path, at+key, strings.ReplaceAll(at, ".", " "))
		}
	}
	return nil
}

// child is the subcommand with a name, nil if there is none.
func child(n *kong.Node, name string) *kong.Node {
	for _, c := range n.Children {
		if c.Name == name {
			return c
		}
	}
	return nil
}

// hasFlag reports whether a command has a flag, itself or as its default subcommand.
func hasFlag(n *kong.Node, name string) bool {
	if n.DefaultCmd != nil && hasFlag(n.DefaultCmd, name) {
		return true
	}
	return name != "help" && name != "config" && slices.ContainsFunc(n.Flags, func(f *kong.Flag) bool { return slices.Contains(names(f), name) })
}

// names are those of a flag, its own first.
func names(f *kong.Flag) []string { return append([]string{f.Name}, f.Aliases...) }

// otherName is another name of a key's flag that the values have too; a section of
// that name is another thing.
func otherName(n *kong.Node, key string, values map[string]any) string {
	for _, f := range n.Flags {
		if !slices.Contains(names(f), key) {
			continue
		}
		for _, name := range names(f) {
			_, isSection := values[name].(map[string]any)
			if _, given := values[name]; given && name != key && !isSection {
				return name
			}
		}
	}
	return ""
}

// Validate implements kong.Resolver; check has done it.
func (c *configFile) Validate(*kong.Application) error { return nil }

// Resolve implements kong.Resolver.
func (c *configFile) Resolve(_ *kong.Context, parent *kong.Path, flag *kong.Flag) (any, error) {
	for _, env := range flag.Envs {
		if _, set := os.LookupEnv(env); set {
			return nil, nil // a variable beats the file
		}
	}
	values := c.values
	if node := parent.Node(); node != nil {
		for _, name := range pathNames(node) {
			next, ok := values[name].(map[string]any)
			if !ok {
				return nil, nil
			}
			values = next
		}
	}
	var v any
	ok := false
	for _, name := range names(flag) {
		if _, isSection := values[name].(map[string]any); !ok && !isSection {
			v, ok = values[name]
		}
	}
	if !ok {
		return nil, nil
	}
	if list, ok := v.([]any); ok {
		parts := make([]string, len(list))
		for i, x := range list {
			parts[i] = fmt.Sprint(x)
		}
		return strings.Join(parts, ","), nil
	}
	return fmt.Sprint(v), nil
}

// pathNames are the names of the commands that lead to a node. A default subcommand has
// none: its flags are those of the command.
func pathNames(n *kong.Node) []string {
	var names []string
	for ; n != nil && n.Type != kong.ApplicationNode; n = n.Parent {
		if n.Parent == nil || n.Parent.DefaultCmd != n {
			names = append([]string{n.Name}, names...)
		}
	}
	return names
}

// bindEnv gives every flag its variable: PREFIX_FLAG, PREFIX_COMMAND_FLAG.
func bindEnv(prefix string) kong.Option {
	var bind func(n *kong.Node)
	bind = func(n *kong.Node) {
		for _, f := range n.Flags {
			if f.Name == "help" {
				continue
			}
			name := strings.Join(append(append([]string{prefix}, pathNames(n)...), f.Name), "_")
			env := strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
			f.Envs, f.Value.Tag.Envs = []string{env}, []string{env}
		}
		for _, c := range n.Children {
			bind(c)
		}
	}
	return kong.PostBuild(func(k *kong.Kong) error {
		bind(k.Model.Node)
		return nil
	})
}
