package demo

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/quarrystore/quarry/btree"
)

// File is one file of the directory.
type File struct {
	Path  string // below the directory
	Bytes int64
}

// maxFileBytes leaves room for what a gateway keeps before a value.
const maxFileBytes = btree.MaxValueBytes - 64

// Find lists the regular files of a directory in the order of a tree's keys. Files
// that are too large for a value, or whose path is too long for a key, are left out
// and counted.
func Find(dir string) (files []File, left int, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if info.Size() > maxFileBytes || len(rel) >= btree.MaxKeyBytes {
			left++
			return nil
		}
		files = append(files, File{rel, info.Size()})
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, fmt.Errorf("%s: no such directory", dir)
	}
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("%s: no files in it", dir)
	}
	slices.SortFunc(files, func(a, b File) int { return strings.Compare(a.Path, b.Path) })
	return files, left, err
}

func (f File) read(dir string) ([]byte, error) {
	b, err := os.ReadFile(filepath.Join(dir, f.Path))
	if err == nil && int64(len(b)) != f.Bytes {
		err = fmt.Errorf("%s changed its size from %d to %d meanwhile", f.Path, f.Bytes, len(b))
	}
	return b, err
}

// thirds parts the files into every third one and the others.
func thirds(files []File) (third, others []File) {
	for i, f := range files {
		if i%3 == 0 {
			third = append(third, f)
		} else {
			others = append(others, f)
		}
	}
	return third, others
}
