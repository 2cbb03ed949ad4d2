package redis

import (
	"maps"
	"slices"
	"strings"
)

// sorted are the commands in the order of their names.
func (s *Server) sorted() []*command {
	var list []*command
	for _, name := range slices.Sorted(maps.Keys(s.commands)) {
		list = append(list, s.commands[name])
	}
	return list
}

func commandAll(c *conn, _ [][]byte) error {
	list := c.s.sorted()
	c.array(len(list))
	for _, cmd := range list {
		c.details(cmd)
	}
	return nil
}

// details describes a command as COMMAND does. Tips and key specifications are left out.
func (c *conn) details(cmd *command) {
	c.array(10)
	c.text(cmd.name)
	c.integer(int64(cmd.arity))
	flags := strings.Fields(cmd.flags)
	c.set(len(flags))
	for _, f := range flags {
		c.status(f)
	}
	c.integer(int64(cmd.first))
	c.integer(int64(cmd.last))
	c.integer(int64(cmd.step))
	c.set(len(cmd.categories))
	for _, category := range cmd.categories {
		c.status("@" + category)
	}
	c.array(0)
	c.array(0)
	c.array(len(cmd.subs))
	for _, name := range slices.Sorted(maps.Keys(cmd.subs)) {
		c.details(cmd.subs[name])
	}
}

func commandCount(c *conn, _ [][]byte) error {
	c.integer(int64(len(c.s.commands)))
	return nil
}

// commandList names commands and subcommands: all, or those that a filter lets through.
func commandList(c *conn, a [][]byte) error {
	let := func(*command) bool { return true }
	switch {
	case len(a) == 2:
	case len(a) != 5 || !equalFold(a[2], "filterby"):
		return errSyntax
	case equalFold(a[3], "module"):
		let = func(*command) bool { return false }
	case equalFold(a[3], "pattern"):
		let = func(cmd *command) bool { return match(a[4], []byte(cmd.name), true) }
	case equalFold(a[3], "aclcat"):
		let = func(cmd *command) bool { return slices.Contains(cmd.categories, lowered(a[4])) }
	default:
		return errSyntax
	}
	var names []string
	for _, cmd := range c.s.numbered {
		if let(cmd) {
			names = append(names, cmd.name)
		}
	}
	c.array(len(names))
	for _, name := range names {
		c.text(name)
	}
	return nil
}

// help is the subcommand HELP of all containers.
func help(c *conn, a [][]byte) error {
	container := lowered(a[0])
	lines := []string{strings.ToUpper(container) + " <subcommand> [<arg> [value] [opt] ...]. Subcommands are:"}
	subs := c.s.commands[container].subs
	for _, name := range slices.Sorted(maps.Keys(subs)) {
		if name != "help" {
			text, usage := subs[name].summary, ""
			if subs[name].usage != "" {
				usage = " " + subs[name].usage
			}
			lines = append(lines, strings.ToUpper(name)+usage, "    "+text+".")
		}
	}
	c.array(len(lines) + 2)
	for _, line := range append(lines, "HELP", "    Print this help.") {
		c.status(line)
	}
	return nil
}

// named finds a command or, as container|name, a subcommand.
func (s *Server) named(name []byte) *command {
	container, sub, ok := strings.Cut(lowered(name), "|")
	cmd := s.commands[container]
	if ok && cmd != nil {
		return cmd.subs[sub]
	}
	return cmd
}

// COMMAND INFO [name ...]: null in the place of an unknown name.
func commandInfo(c *conn, a [][]byte) error {
	if len(a) == 2 {
		return commandAll(c, a)
	}
	c.array(len(a) - 2)
	for _, name := range a[2:] {
		if cmd := c.s.named(name); cmd != nil {
			c.details(cmd)
		} else {
			c.null()
		}
	}
	return nil
}

// COMMAND DOCS [name ...]. Unknown names are left out.
func commandDocs(c *conn, a [][]byte) error {
	list := c.s.sorted()
	if len(a) > 2 {
		list = nil
		for _, name := range a[2:] {
			if cmd := c.s.named(name); cmd != nil {
				list = append(list, cmd)
			}
		}
	}
	c.mapping(len(list))
	for _, cmd := range list {
		c.docs(cmd)
	}
	return nil
}

// The entry of a command, and of its subcommands. A map's length comes first, so that the fields
// are counted before they are written.
func (c *conn) docs(cmd *command) {
	c.text(cmd.name)
	n := 0
	for _, s := range []string{cmd.summary, cmd.group} {
		if s != "" {
			n++
		}
	}
	if cmd.subs != nil {
		n++
	}
	c.mapping(n)
	if cmd.summary != "" {
		c.text("summary")
		c.text(cmd.summary)
	}
	if cmd.group != "" {
		c.text("group")
		c.text(cmd.group)
	}
	if cmd.subs != nil {
		c.text("subcommands")
		c.mapping(len(cmd.subs))
		for _, name := range slices.Sorted(maps.Keys(cmd.subs)) {
			c.docs(cmd.subs[name])
		}
	}
}
