package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/btree/kv"
	"github.com/quarrystore/quarry/client"
	"github.com/quarrystore/quarry/gateway/redis"
)

// TreeName is the tree that the files are in: path -> content, as database 0 of a
// Redis gateway has it.
const TreeName = "demo"

// Options of each part.
type Options struct {
	Workers  int                   // goroutines; 0 means 4
	Progress func(done, total int) // may be nil
}

func (o Options) withDefaults() Options {
	if o.Workers == 0 {
		o.Workers = 4
	}
	if o.Progress == nil {
		o.Progress = func(int, int) {}
	}
	return o
}

// Load keeps every file of a directory in a new tree.
func Load(ctx context.Context, c *client.Client, dir string, o Options) (Result, error) {
	o = o.withDefaults()
	files, _, err := Find(dir)
	if err != nil {
		return Result{}, err
	}
	tree, err := kv.Create(ctx, c, TreeName, btree.Config{})
	if err != nil {
		return Result{}, err
	}
	t := begin(c, "load")
	err = each(ctx, files, o, func(ctx context.Context, f File) error {
		b, err := f.read(dir)
		if err != nil {
			return err
		}
		key, value := redis.AppendKey(nil, 0, []byte(f.Path)), redis.AppendString(nil, b)
		at := time.Now()
		if err = tree.PutIfAbsent(ctx, key, value); err == nil {
			t.add(time.Since(at), len(b))
		}
		return err
	})
	return t.end(), err
}

// tree opens the tree of the files.
func tree(ctx context.Context, c *client.Client) (*kv.Tree, error) {
	return kv.Open(ctx, c, TreeName, btree.Config{})
}

// compare says where what a tree has differs from the file, byte for byte.
func (t *tally) compare(dir string, f File, value []byte) error {
	want, err := f.read(dir)
	if err != nil {
		return err
	}
	got, ok, err := redis.CutString(value, time.Now())
	switch {
	case err != nil || !ok:
		t.mismatch(f.Path, "no string in the tree: %v", err)
	case !bytes.Equal(got, want):
		t.mismatch(f.Path, "%d bytes differ from the file's %d", len(got), len(want))
	}
	return nil
}

// ReadBack reads every file from the tree and compares it byte for byte. With less,
// every third file must be gone. Nothing else may be in the tree.
func ReadBack(ctx context.Context, c *client.Client, dir string, less bool, o Options) (Result, error) {
	o = o.withDefaults()
	files, _, err := Find(dir)
	if err != nil {
		return Result{}, err
	}
	var gone []File
	if less {
		gone, files = thirds(files)
	}
	tree, err := tree(ctx, c)
	if err != nil {
		return Result{}, err
	}
	t := begin(c, "read back")
	err = each(ctx, files, o, func(ctx context.Context, f File) error {
		at := time.Now()
		value, err := tree.Get(ctx, redis.AppendKey(nil, 0, []byte(f.Path)), nil)
		if errors.Is(err, btree.ErrNoKey) {
			t.mismatch(f.Path, "not in the tree")
			return nil
		} else if err != nil {
			return err
		}
		t.add(time.Since(at), len(value)-1)
		return t.compare(dir, f, value)
	})
	if err != nil {
		return Result{}, err
	}
	result := t.end()
	for _, f := range gone {
		if _, err := tree.Get(ctx, redis.AppendKey(nil, 0, []byte(f.Path)), nil); !errors.Is(err, btree.ErrNoKey) {
			t.mismatch(f.Path, "was deleted, reading it says: %v", err)
		}
	}
	if n, err := tree.Count(ctx, btree.Range{}); err != nil {
		return Result{}, err
	} else if n != len(files) {
		t.mismatch(tree.String(), "has %d keys, there are %d files", n, len(files))
	}
	result.Mismatches = t.r.Mismatches
	return result, nil
}

// Scan reads all files of a folder in one scan and compares them. The folder is the
// first part of the path of the file in the middle.
func Scan(ctx context.Context, c *client.Client, dir string, o Options) (Result, error) {
	files, _, err := Find(dir)
	if err != nil {
		return Result{}, err
	}
	folder, rest, _ := strings.Cut(files[len(files)/2].Path, "/")
	if rest != "" {
		folder += "/"
	}
	files = slices.DeleteFunc(files, func(f File) bool { return !strings.HasPrefix(f.Path, folder) })
	tree, err := tree(ctx, c)
	if err != nil {
		return Result{}, err
	}
	o = o.withDefaults()
	t := begin(c, "scan "+folder)
	at, n := time.Now(), 0
	var failed error
	from := redis.AppendKey(nil, 0, []byte(folder))
	to := append(slices.Clone(from[:len(from)-1]), from[len(from)-1]+1) // behind all that start so
	err = tree.Scan(ctx, btree.Range{From: from, To: to}, func(key, value []byte, _ uint64) bool {
		path := string(key[1:])
		if n == len(files) || files[n].Path != path {
			t.mismatch(path, "not the next of the folder's %d files", len(files))
			return false
		}
		t.add(time.Since(at), len(value)-1)
		failed = t.compare(dir, files[n], value)
		n++
		o.Progress(n, len(files))
		at = time.Now()
		return failed == nil
	})
	if n < len(files) && len(t.r.Mismatches) == 0 {
		t.mismatch(folder, "the scan found %d of %d files", n, len(files))
	}
	return t.end(), errors.Join(failed, err)
}

// lookups is how many files redis-cli is asked for: a process each.
const lookups = 5

// AskRedis asks redis-cli for some files through a Redis gateway to the tree. The
// error is redis.ErrNoCLI where it is not installed.
func AskRedis(ctx context.Context, c *client.Client, dir string) (Result, error) {
	files, _, err := Find(dir)
	if err != nil {
		return Result{}, err
	}
	var some []File
	var keys []string
	for i := range min(lookups, len(files)) {
		f := files[(2*i+1)*len(files)/(2*lookups)]
		some, keys = append(some, f), append(keys, f.Path)
	}
	tree, err := tree(ctx, c)
	if err != nil {
		return Result{}, err
	}
	t := begin(c, "redis-cli GET")
	values, err := redis.AskCLI(ctx, tree, keys)
	if err != nil {
		return Result{}, err
	}
	each := time.Since(t.start) / time.Duration(len(some))
	for i, f := range some {
		if values[i] == nil {
			t.mismatch(f.Path, "redis-cli does not find it")
			continue
		}
		t.add(each, len(values[i]))
		if err := t.compare(dir, f, redis.AppendString(nil, values[i])); err != nil {
			return Result{}, err
		}
	}
	r := t.end()
	r.MBPerS = 0 // what takes time is starting processes
	return r, nil
}

// Sample has one object of each region that has objects: a client that can read all of them
// reaches all memory.
type Sample []client.Ref

// TakeSample finds one.
func TakeSample(ctx context.Context, c *client.Client) (s Sample, err error) {
	t, err := tree(ctx, c)
	if err != nil {
		return nil, err
	}
	seen := map[uint32]bool{}
	err = t.Walk(ctx, func(o btree.Object) error {
		if id := o.Ref.Addr.Region(); !seen[id] {
			seen[id], s = true, append(s, o.Ref)
		}
		return nil
	})
	return s, err
}

// Touch reads the sample and writes a key: when it returns, the store serves.
func Touch(ctx context.Context, c *client.Client, s Sample) error {
	var buf []byte
	for _, ref := range s {
		var err error
		if buf, err = c.Read(ctx, ref, buf[:0]); err != nil {
			return fmt.Errorf("object %v: %w", ref, err)
		}
	}
	t, err := tree(ctx, c)
	if err != nil {
		return err
	}
	key := redis.AppendKey(nil, 0, []byte("touch"))
	if err := t.Put(ctx, key, redis.AppendString(nil, nil)); err != nil {
		return err
	}
	return t.Delete(ctx, key)
}

// DeleteThird deletes every third file.
func DeleteThird(ctx context.Context, c *client.Client, dir string, o Options) (Result, error) {
	o = o.withDefaults()
	files, _, err := Find(dir)
	if err != nil {
		return Result{}, err
	}
	third, _ := thirds(files)
	tree, err := tree(ctx, c)
	if err != nil {
		return Result{}, err
	}
	t := begin(c, "delete a third")
	err = each(ctx, third, o, func(ctx context.Context, f File) error {
		at := time.Now()
		err := tree.Delete(ctx, redis.AppendKey(nil, 0, []byte(f.Path)))
		if err == nil {
			t.add(time.Since(at), int(f.Bytes))
		}
		return err
	})
	r := t.end()
	r.MBPerS = 0
	return r, err
}
