package guest

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"slices"

	"github.com/quarrystore/quarry/coproc"
)

// Main is a module's main function: it serves standard input and output.
func Main(name, summary string, make func() coproc.Plugin) {
	if err := Serve(name, summary, make, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// Serve runs one part of a plugin and returns at its end.
func Serve(name, summary string, make func() coproc.Plugin, in io.Reader, out io.Writer) error {
	g := &conn{in: bufio.NewReaderSize(in, 64<<10), out: bufio.NewWriterSize(out, 64<<10)}
	kind, a, _, err := g.read()
	if err != nil || kind != coproc.FrameStart {
		return fmt.Errorf("no start: %w", errors.Join(err, coproc.ErrFrame))
	}
	var start coproc.Start
	if err := json.Unmarshal(a, &start); err != nil {
		return fmt.Errorf("start: %w", err)
	}
	p := make()
	if start.Describe {
		about, err := json.Marshal(coproc.Describe(name, summary, p))
		if err != nil {
			return err
		}
		g.frame(coproc.FrameAbout, about, nil)
		return g.flush()
	}
	text := ""
	if err := g.run(p, newEnv(g, start), start.Part.Phase); err != nil {
		text = err.Error()
	}
	g.frame(coproc.FrameDone, nil, []byte(text))
	return g.flush()
}

func (g *conn) run(p coproc.Plugin, e *env, phase coproc.Phase) error {
	if phase == coproc.PhaseMap {
		return g.mapRecords(p, e)
	}
	reduce := func(coproc.Env, []byte, iter.Seq[[]byte], coproc.Emit) error {
		return errors.New("plugin does not reduce")
	}
	if r, ok := p.(coproc.Reducer); ok && phase == coproc.PhaseReduce {
		reduce = r.Reduce
	}
	if c, ok := p.(coproc.Combiner); ok && phase == coproc.PhaseCombine {
		reduce = c.Combine
	}
	return g.reduceGroups(e, reduce)
}

func (g *conn) emit(key, value []byte) error {
	g.frame(coproc.FrameEmit, key, value)
	return g.err
}

// mapRecords has the plugin map each record that the host sends.
func (g *conn) mapRecords(p coproc.Plugin, e *env) error {
	for {
		kind, key, value, err := g.read()
		switch {
		case err != nil:
			return err
		case kind == coproc.FrameRecord:
			if err := p.Map(e, key, value, g.emit); err != nil {
				return err
			}
		case kind == coproc.FrameEnd:
			if f, ok := p.(coproc.Finisher); ok {
				return f.Finish(e, g.emit)
			}
			return nil
		default:
			return coproc.ErrFrame
		}
	}
}

// reduceGroups has the plugin reduce each group that the host sends: a key, then its values.
func (g *conn) reduceGroups(e *env, reduce func(coproc.Env, []byte, iter.Seq[[]byte], coproc.Emit) error) error {
	kind, a, _, err := g.read()
	for {
		if err != nil {
			return err
		}
		if kind == coproc.FrameEnd {
			return nil
		}
		if kind != coproc.FrameGroup {
			return coproc.ErrFrame
		}
		key := slices.Clone(a)
		ended := false
		values := func(yield func([]byte) bool) {
			for !ended {
				var v []byte
				if kind, a, v, err = g.read(); err != nil || kind != coproc.FrameValue {
					ended = true
					return
				}
				if !yield(v) {
					return
				}
			}
		}
		if rerr := reduce(e, key, values, g.emit); rerr != nil {
			return rerr
		}
		for range values { // those that the plugin did not take
		}
	}
}

// conn reads and writes frames. After the first error every call returns that error.
type conn struct {
	in    *bufio.Reader
	out   *bufio.Writer
	buf   []byte
	head  []byte
	early []frame // input that came before an answer
	err   error
}

type frame struct {
	kind byte
	a, b []byte
}

// read returns the next input frame; a and b are valid until the next read.
func (g *conn) read() (kind byte, a, b []byte, err error) {
	if len(g.early) > 0 {
		f := g.early[0]
		g.early = g.early[1:]
		return f.kind, f.a, f.b, nil
	}
	if g.in.Buffered() == 0 {
		// The worker may wait for what we have said before it says more.
		if err := g.flush(); err != nil {
			return 0, nil, nil, err
		}
	}
	kind, a, b, g.buf, err = coproc.ReadFrame(g.in, g.buf)
	return kind, a, b, err
}

func (g *conn) frame(kind byte, a, b []byte) {
	if g.err != nil {
		return
	}
	g.head = append(g.head[:0], kind)
	g.head = binary.LittleEndian.AppendUint32(g.head, uint32(len(a)))
	g.head = binary.LittleEndian.AppendUint32(g.head, uint32(len(b)))
	for _, p := range [][]byte{g.head, a, b} {
		if _, err := g.out.Write(p); err != nil {
			g.err = err
			return
		}
	}
}

func (g *conn) flush() error {
	if g.err == nil {
		g.err = g.out.Flush()
	}
	return g.err
}

// call asks the worker for something.
func (g *conn) call(c coproc.EnvCall, payload []byte) ([]byte, error) {
	b, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	g.frame(coproc.FrameCall, b, payload)
	if err := g.flush(); err != nil {
		return nil, err
	}
	for {
		kind, x, y, _, err := coproc.ReadFrame(g.in, nil)
		switch {
		case err != nil:
			return nil, err
		case kind != coproc.FrameAnswer:
			g.early = append(g.early, frame{kind, x, y})
		case len(y) > 0:
			return nil, answerError(string(y))
		default:
			return x, nil
		}
	}
}

// answerError keeps the errors that a plugin may want to tell apart.
func answerError(text string) error {
	for _, e := range []error{coproc.ErrNoKey, coproc.ErrOutside} {
		if text == e.Error() {
			return e
		}
	}
	return errors.New(text)
}
