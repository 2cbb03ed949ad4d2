package words

import (
	"fmt"
	"iter"
	"strconv"

	"github.com/quarrystore/quarry/coproc"
)

// Name and Summary of the plugin.
const (
	Name    = "words"
	Summary = "counts the words of all values"
)

// Plugin counts.
type Plugin struct{ buf []byte }

// New makes a Plugin.
func New() coproc.Plugin { return &Plugin{} }

func init() { coproc.Register(Name, Summary, New) }

var one = []byte("1")

// Map emits each word once for each time it occurs.
func (p *Plugin) Map(_ coproc.Env, _, value []byte, emit coproc.Emit) error {
	for w := range Split(value, &p.buf) {
		if err := emit(w, one); err != nil {
			return err
		}
	}
	return nil
}

// Combine adds up.
func (p *Plugin) Combine(env coproc.Env, key []byte, values iter.Seq[[]byte], emit coproc.Emit) error {
	return p.Reduce(env, key, values, emit)
}

// Reduce adds up.
func (p *Plugin) Reduce(_ coproc.Env, key []byte, values iter.Seq[[]byte], emit coproc.Emit) error {
	total := uint64(0)
	for v := range values {
		n, err := strconv.ParseUint(string(v), 10, 64)
		if err != nil {
			return fmt.Errorf("count of %q: %w", key, err)
		}
		total += n
	}
	return emit(key, strconv.AppendUint(nil, total, 10))
}

// MaxWordBytes is the length of the longest word that counts as one.
const MaxWordBytes = 64

// Split gives out the words of a text: letters and digits of ASCII, in lower case,
// and whole sequences beyond ASCII. Words die with the next one; buf is room.
func Split(text []byte, buf *[]byte) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		word := (*buf)[:0]
		defer func() { *buf = word }()
		for _, c := range text {
			switch {
			case 'A' <= c && c <= 'Z':
				word = append(word, c+'a'-'A')
				continue
			case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c >= 0x80:
				word = append(word, c)
				continue
			}
			if n := len(word); n > 0 && n <= MaxWordBytes && !yield(word) {
				return
			}
			word = word[:0]
		}
		if n := len(word); n > 0 && n <= MaxWordBytes {
			yield(word)
		}
	}
}
