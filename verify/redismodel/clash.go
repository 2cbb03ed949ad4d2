package redismodel

import "slices"

// Clash is commands of clients that meet at the key a.
type Clash struct {
	Clients [][][]string // commands of each
	Filled  []string     // keys that hold something at the beginning
}

// wholeKeys are the commands of across.
var wholeKeys = []string{"RENAME", "RENAMENX", "COPY", "EXPIRE", "DEL"}

// Clash makes one of three kinds: two equal commands beside one that ends what the key holds;
// a command or the removal of a field beside one that ends it, or a COPY beside DEL; a COPY
// to the key beside a command on the key and one that ends what it holds.
func (g *Script) Clash(family string) Clash {
	g.only = true
	defer func() { g.only = false }()
	switch g.Rnd.IntN(3) {
	case 0:
		cmd := g.use(family)
		return Clash{[][][]string{{cmd}, {cmd}, {g.end()}}, []string{"a", "b"}}
	case 1:
		cmd := g.use(family)
		switch g.Rnd.IntN(5) {
		case 0, 1:
			return Clash{[][][]string{{{"COPY", "a", "c"}}, {{"DEL", "a"}}}, []string{"a", "b"}}
		case 2:
			if remove, ok := removes[family]; ok {
				cmd = []string{remove, "a", g.field()}
			}
		}
		return Clash{[][][]string{{cmd}, {g.end()}}, []string{"a", "b"}}
	}
	cmd := g.use(family)
	switch g.Rnd.IntN(4) {
	case 0:
		cmd = []string{"EXPIRE", "a", "1000000"}
	case 1:
		cmd = []string{"SETNX", "a", g.value()}
	case 2:
		cmd = []string{"COPY", "b", "a"}
	}
	return Clash{[][][]string{{{"COPY", "b", "a"}}, {cmd, g.end()}}, []string{"b"}}
}

// removes are the commands that remove a field or a member.
var removes = map[string]string{"hashes": "HDEL", "sorted sets": "ZREM"}

// use makes a command of a family that is not of across.
func (g *Script) use(family string) []string {
	for {
		if cmd := Families[family](g); !slices.Contains(wholeKeys, cmd[0]) {
			return cmd
		}
	}
}

// end makes a command that ends the hash or sorted set at the key a.
func (g *Script) end() []string {
	switch g.Rnd.IntN(4) {
	case 0:
		return []string{"RENAME", "b", "a"}
	case 1:
		return []string{"COPY", "b", "a", "REPLACE"}
	}
	return []string{"DEL", "a"}
}
