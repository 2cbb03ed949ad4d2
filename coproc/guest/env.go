package guest

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/quarrystore/quarry/coproc"
	"github.com/quarrystore/quarry/proto"
)

// env sends calls to the worker. Its context has the deadline; a canceled module is ended without
// notice.
type env struct {
	g        *conn
	part     coproc.Part
	args     map[string]string
	deadline time.Time
}

func newEnv(g *conn, s coproc.Start) *env {
	return &env{g: g, part: s.Part, args: s.Args, deadline: time.Now().Add(time.Duration(s.MicrosLeft) * time.Microsecond)}
}

func (e *env) Context() context.Context { return context.Background() }
func (e *env) Deadline() time.Time      { return e.deadline }
func (e *env) Part() coproc.Part        { return e.part }

func (e *env) Arg(name, missing string) string {
	if v, ok := e.args[name]; ok {
		return v
	}
	return missing
}

func (e *env) Progress(done, of uint64) {
	b := binary.LittleEndian.AppendUint64(nil, done)
	e.g.frame(coproc.FrameProgress, binary.LittleEndian.AppendUint64(b, of), nil)
}

func (e *env) Logf(format string, args ...any) {
	e.g.frame(coproc.FrameLog, fmt.Appendf(nil, format, args...), nil)
}

func (e *env) Alloc(payload []byte) (coproc.Ref, error) {
	b, err := e.g.call(coproc.EnvCall{Op: "alloc"}, payload)
	return refOf(b, err)
}

func refOf(b []byte, err error) (coproc.Ref, error) {
	if err != nil {
		return coproc.Ref{}, err
	}
	return proto.ParseRef(string(b))
}

func (e *env) Read(ref coproc.Ref, dst []byte) ([]byte, error) {
	b, err := e.g.call(coproc.EnvCall{Op: "read", Ref: ref.String()}, nil)
	return append(dst, b...), err
}

func (e *env) Write(ref coproc.Ref, payload []byte) error {
	_, err := e.g.call(coproc.EnvCall{Op: "write", Ref: ref.String()}, payload)
	return err
}

func (e *env) Free(ref coproc.Ref) error {
	_, err := e.g.call(coproc.EnvCall{Op: "free", Ref: ref.String()}, nil)
	return err
}

func (e *env) Lookup(name string) (coproc.Ref, error) {
	return refOf(e.g.call(coproc.EnvCall{Op: "lookup", Name: name}, nil))
}

func (e *env) Tree(name string) (coproc.Tree, error) {
	if _, err := e.g.call(coproc.EnvCall{Op: "tree", Name: name}, nil); err != nil {
		return nil, err
	}
	return tree{e.g, name}, nil
}

type tree struct {
	g    *conn
	name string
}

func (t tree) Get(key, dst []byte) ([]byte, error) {
	b, err := t.g.call(coproc.EnvCall{Op: "treeget", Name: t.name, Key: key}, nil)
	return append(dst, b...), err
}

func (t tree) Put(key, value []byte) error {
	_, err := t.g.call(coproc.EnvCall{Op: "treeput", Name: t.name, Key: key}, value)
	return err
}

func (t tree) Delete(key []byte) error {
	_, err := t.g.call(coproc.EnvCall{Op: "treedelete", Name: t.name, Key: key}, nil)
	return err
}

// scanPage entries are asked for at a time.
const scanPage = 256

func (t tree) Scan(from, to []byte, limit int, f func(key, value []byte) bool) error {
	for {
		page := scanPage
		if limit > 0 {
			page = min(page, limit)
		}
		b, err := t.g.call(coproc.EnvCall{Op: "treescan", Name: t.name, Key: from, To: to, Limit: page}, nil)
		if err != nil {
			return err
		}
		n := 0
		for len(b) > 0 {
			key, value, rest, ok := coproc.CutRecord(b)
			if !ok {
				return coproc.ErrFrame
			}
			if !f(key, value) {
				return nil
			}
			from, b, n = append(append(from[:0:0], key...), 0), rest, n+1
		}
		if limit -= n; n == 0 || limit == 0 { // a page may be short of entries for their size
			return nil
		}
	}
}
