package job

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/tetratelabs/wazero"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/coproc"
)

// Module is an uploaded plugin. Its bytes stand under their hash, so that a worker
// never runs half of an upload, nor one it has not asked for.
//
//	module/NAME     this record
//	wasm/SHA256     the bytes
type Module struct {
	About   coproc.About `json:"about"`   // what the module has said of itself when it was uploaded
	Bytes   int          `json:"bytes"`   // length of the module
	SHA256  string       `json:"sha256"`  // of the bytes, in hexadecimal: their key
	Created time.Time    `json:"created"` // when it was uploaded
}

// moduleKey is where a module's record is, by name.
func moduleKey(name string) []byte { return append([]byte("module/"), name...) }

// wasmKey is where a module's code is, by hash.
func wasmKey(hash string) []byte { return append([]byte("wasm/"), hash...) }

// PutModule checks a WASM module and uploads it; one of the same name is replaced.
func (s *Store) PutModule(ctx context.Context, name string, wasm []byte) (Module, error) {
	if err := ctx.Err(); err != nil {
		return Module{}, err
	}
	if name == "" || len(name) > 64 || strings.ContainsAny(name, "/ ") {
		return Module{}, fmt.Errorf("module name %q: want a word of at most 64 bytes without / and spaces", name)
	}
	if len(wasm) > MaxModuleBytes {
		return Module{}, fmt.Errorf("module %s: %d bytes, at most %d", name, len(wasm), MaxModuleBytes)
	}
	// Interpreted, because to compile it takes seconds for one call.
	r := newRuntime(ctx, wazero.NewRuntimeConfigInterpreter(), DefaultMemoryBytes)
	defer r.close()
	about, err := r.describe(ctx, wasm)
	if err != nil {
		return Module{}, fmt.Errorf("module %s: %w", name, err)
	}
	about.Name, about.WASM = name, true
	hash := sha256.Sum256(wasm)
	m := Module{About: about, Bytes: len(wasm), SHA256: hex.EncodeToString(hash[:]), Created: time.Now().UTC()}
	old, _ := s.module(ctx, name)
	if err := s.t.Put(ctx, wasmKey(m.SHA256), wasm); err != nil {
		return Module{}, fmt.Errorf("module %s: %w", name, err)
	}
	if err := s.t.Put(ctx, moduleKey(name), encode(m)); err != nil {
		return Module{}, fmt.Errorf("module %s: %w", name, err)
	}
	return m, s.dropWASM(ctx, old.SHA256)
}

// dropWASM removes bytes that no module names any more.
func (s *Store) dropWASM(ctx context.Context, hash string) error {
	all, err := s.Modules(ctx)
	if err != nil || hash == "" {
		return err
	}
	for _, m := range all {
		if m.SHA256 == hash {
			return nil
		}
	}
	if err := s.t.Delete(ctx, wasmKey(hash)); err != nil && !errors.Is(err, btree.ErrNoKey) {
		return err
	}
	return nil
}

// Modules lists what has been uploaded.
func (s *Store) Modules(ctx context.Context) ([]*Module, error) {
	return list[Module](ctx, s.t, prefixed("module/"), nil)
}

// module finds an uploaded plugin; ErrNoPlugin if there is none.
func (s *Store) module(ctx context.Context, name string) (m Module, err error) {
	b, err := s.t.Get(ctx, moduleKey(name), nil)
	if errors.Is(err, btree.ErrNoKey) {
		return m, fmt.Errorf("%w: %q", ErrNoPlugin, name)
	}
	if err == nil {
		err = json.Unmarshal(b, &m)
	}
	return m, err
}

// wasm reads the bytes of a module.
func (s *Store) wasm(ctx context.Context, m Module) ([]byte, error) {
	b, err := s.t.Get(ctx, wasmKey(m.SHA256), nil)
	if err != nil {
		return nil, fmt.Errorf("module %s: %w", m.About.Name, err)
	}
	if hash := sha256.Sum256(b); hex.EncodeToString(hash[:]) != m.SHA256 {
		return nil, fmt.Errorf("module %s: its bytes do not have the hash %s", m.About.Name, m.SHA256)
	}
	return b, nil
}

// RemoveModule removes an uploaded plugin.
func (s *Store) RemoveModule(ctx context.Context, name string) error {
	m, err := s.module(ctx, name)
	if err != nil {
		return err
	}
	if err := s.t.Delete(ctx, moduleKey(name)); err != nil {
		return err
	}
	return s.dropWASM(ctx, m.SHA256)
}
