package redismodel

// absent is the text of a field that is not there.
const absent text = 0

// text is the number of a string of the history.
type text uint32

// texts numbers strings, so that states are small and comparable.
type texts struct {
	all     []string
	numbers map[string]text
}

func newTexts() texts { return texts{all: []string{"(absent)"}, numbers: map[string]text{}} }

func (t *texts) of(s string) text {
	n, ok := t.numbers[s]
	if !ok {
		n = text(len(t.all))
		t.all, t.numbers[s] = append(t.all, s), n
	}
	return n
}

const (
	kindNone = iota
	kindString
	kindHash
	kindZset
)

var kindNames = [...]string{kindNone: "none", kindString: "string", kindHash: "hash", kindZset: "zset"}

// held is what a key holds: a string in v[0], or the fields f and g.
type held struct {
	kind uint8
	v    [2]text
}

// empty says whether a key may count as absent.
func (h held) empty() bool {
	return h.kind == kindNone || h.kind != kindString && h.v == [2]text{absent, absent}
}

// Where a command has found a hash or sorted set, if not at the key before this number.
const (
	atNone    int8 = 0
	atEnded   int8 = -1 // its key was removed or replaced
	atRefused int8 = -2 // the key holds a string
)

// register is what a command keeps between its atoms.
type register struct {
	step int8
	at   int8
	kind uint8 // COPY: of the source
	seen bool  // its write in the hash at at, before the removal of that
	f, g text
}

// state is comparable. A hash has no state of its own: it is what its key holds, and
// registers follow it when a RENAME gives it another key. No command reads or changes a hash
// that has ended, since an instant before its end explains the same.
type state struct {
	keys [3]held
	regs [maxOps]register
}

// put replaces what a key holds; a hash that was there ends.
func (s *state) put(key int, h held) {
	s.keys[key] = h
	for i := range s.regs {
		if s.regs[i].at == int8(key)+1 {
			s.regs[i].at = atEnded
		}
	}
}

// rename moves what a key holds.
func (s *state) rename(from, to int) {
	s.put(to, s.keys[from])
	for i := range s.regs {
		if s.regs[i].at == int8(from)+1 {
			s.regs[i].at = int8(to) + 1
		}
	}
	s.keys[from] = held{}
}
