package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/quarrystore/quarry/client"
)

// CatalogueName is the catalogue's friendly name.
const CatalogueName = "demo/catalogue"

// Entry is one file.
type Entry struct {
	Path  string     `json:"path"` // below the directory
	Bytes int64      `json:"bytes"`
	Ref   client.Ref `json:"ref"`
}

// Catalogue lists what is kept. It is one object.
type Catalogue struct {
	Entries []Entry `json:"entries"`
	Freed   []Entry `json:"freed,omitempty"`
}

// Find lists the regular files of a directory, in order. Files larger than an
// object can be are left out, and counted.
func Find(dir string) (files []Entry, left int, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if info.Size() > client.MaxObjectBytes {
			left++
			return nil
		}
		rel, err := filepath.Rel(dir, path)
		files = append(files, Entry{Path: rel, Bytes: info.Size()})
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, fmt.Errorf("%s: no such directory", dir)
	}
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("%s: no files in it", dir)
	}
	return files, left, err
}

func (k *Catalogue) encode() ([]byte, error) { return json.Marshal(k) }

// open reads the catalogue by its name.
func open(ctx context.Context, c *client.Client) (*Catalogue, client.Ref, error) {
	n, err := c.Names().Lookup(ctx, CatalogueName)
	if err != nil {
		return nil, client.Ref{}, err
	}
	b, err := c.Read(ctx, n.Ref, nil)
	if err != nil {
		return nil, n.Ref, fmt.Errorf("catalogue %v: %w", n.Ref, err)
	}
	var k Catalogue
	if err := json.Unmarshal(b, &k); err != nil {
		return nil, n.Ref, fmt.Errorf("catalogue %v: %w", n.Ref, err)
	}
	return &k, n.Ref, nil
}

func readFile(dir string, e Entry) ([]byte, error) {
	b, err := os.ReadFile(filepath.Join(dir, e.Path))
	if err == nil && int64(len(b)) != e.Bytes {
		err = fmt.Errorf("%s changed its size from %d to %d meanwhile", e.Path, e.Bytes, len(b))
	}
	return b, err
}
