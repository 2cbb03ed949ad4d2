package redismodel

import (
	"math/rand/v2"
	"strconv"
)

// Script makes commands. Values are unique, so that each answer names the command that it saw.
type Script struct {
	Rnd    *rand.Rand
	Prefix string // of values
	only   bool   // commands are on the key a, and mostly on its field f
	n      int
}

// Keys and fields of the commands.
var (
	Keys   = []string{"a", "b", "c"}
	Fields = []string{"f", "g"}
)

func (g *Script) one(of ...string) string { return of[g.Rnd.IntN(len(of))] }

func (g *Script) key() string {
	if g.only {
		return "a"
	}
	return g.one("a", "a", "a", "b", "b", "c")
}

func (g *Script) field() string {
	if g.only && g.Rnd.IntN(4) > 0 {
		return "f"
	}
	return g.one("f", "f", "g")
}

// value is one that no other command writes.
func (g *Script) value() string {
	g.n++
	return g.Prefix + "v" + strconv.Itoa(g.n)
}

// across changes two keys, or all of one.
func (g *Script) across() []string {
	switch g.Rnd.IntN(8) {
	case 0, 1, 2:
		return []string{"RENAME", g.key(), g.key()}
	case 3:
		return []string{"RENAMENX", g.key(), g.key()}
	case 4:
		return []string{"COPY", g.key(), g.key(), "REPLACE"}
	case 5:
		return []string{"COPY", g.key(), g.key()}
	case 6:
		return []string{"EXPIRE", g.key(), "1000000"}
	}
	return []string{"DEL", g.key()}
}

// Strings makes one command of its family, or one across keys.
func (g *Script) Strings() []string {
	switch g.Rnd.IntN(9) {
	case 0, 1:
		return []string{"SET", g.key(), g.value()}
	case 2:
		return []string{"GET", g.key()}
	case 3:
		return []string{"APPEND", g.key(), "x"}
	case 4:
		return []string{"SETNX", g.key(), g.value()}
	case 5:
		return []string{"GETDEL", g.key()}
	case 6:
		return []string{"GETSET", g.key(), g.value()}
	}
	return g.across()
}

// Counters makes one command of its family, or one across keys.
func (g *Script) Counters() []string {
	switch g.Rnd.IntN(8) {
	case 0, 1, 2:
		return []string{"INCR", g.key()}
	case 3:
		return []string{"SET", g.key(), strconv.Itoa(100 * g.Rnd.IntN(5))}
	case 4:
		return []string{"GET", g.key()}
	}
	return g.across()
}

// Hashes makes one command of its family, or one across keys.
func (g *Script) Hashes() []string {
	switch g.Rnd.IntN(11) {
	case 0, 1:
		return []string{"HSET", g.key(), g.field(), strconv.Itoa(100 * g.Rnd.IntN(9))}
	case 2, 3:
		return []string{"HINCRBY", g.key(), g.field(), "1"}
	case 4:
		return []string{"HSETNX", g.key(), g.field(), strconv.Itoa(100 * g.Rnd.IntN(9))}
	case 5, 6:
		return []string{"HGET", g.key(), g.field()}
	case 7:
		return []string{"HDEL", g.key(), g.field()}
	}
	return g.across()
}

// SortedSets makes one command of its family, or one across keys.
func (g *Script) SortedSets() []string {
	switch g.Rnd.IntN(11) {
	case 0, 1, 2, 3:
		return []string{"ZADD", g.key(), strconv.Itoa(1 + g.Rnd.IntN(3)), g.field()}
	case 4:
		return []string{"ZADD", g.key(), "INCR", "1", g.field()}
	case 5:
		return []string{"ZSCORE", g.key(), g.field()}
	case 6, 7:
		return []string{"ZREM", g.key(), g.field()}
	case 8:
		return []string{"ZADD", g.key(), g.one("NX", "XX", "GT", "LT"), strconv.Itoa(1 + g.Rnd.IntN(3)), g.field()}
	}
	return g.across()
}

// Families of commands, by name.
var Families = map[string]func(*Script) []string{"strings": (*Script).Strings, "counters": (*Script).Counters, "hashes": (*Script).Hashes, "sorted sets": (*Script).SortedSets}
