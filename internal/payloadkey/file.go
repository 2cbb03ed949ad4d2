package payloadkey

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	// keyMark precedes a key in files.
	keyMark = "quarrykey1:"
	// maxFileBytes and MaxKeys bound what is read.
	maxFileBytes = 1 << 20
	MaxKeys      = 64
	fileHead     = "# Keys of payloads, one a line: TENANT KEY. A tenant's first key encrypts, all of them decrypt.\n"
)

// Text is a key as files have it.
func (k Key) Text() string { return keyMark + base64.StdEncoding.EncodeToString(k[:]) }

// parse reads the form of Text. Its error does not show the text, which may be a secret.
func parse(s string) (k Key, err error) {
	b, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(s, keyMark))
	if err != nil || len(b) != KeyBytes || !strings.HasPrefix(s, keyMark) {
		return Key{}, fmt.Errorf("want %s and %d bytes in base64, as quarry key payload create writes it", keyMark, KeyBytes)
	}
	return Key(b), nil
}

// Entry is a line of a key file.
type Entry struct {
	Tenant string
	Key    Key
}

// others are the mode bits of a key file that let other users in. A file of root may be readable by its
// group: secrets are mounted so for a service that is in the group and does not own them.
func others(st *unix.Stat_t) fs.FileMode {
	if st.Uid == 0 {
		return 0o037
	}
	return 0o077
}

// ReadFile reads a key file. It refuses a file that other users may read or change.
func ReadFile(name string) ([]Entry, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0) // a pipe does not hold it up
	if err != nil {
		return nil, fmt.Errorf("key file: %w", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	var st unix.Stat_t
	if err == nil {
		err = unix.Fstat(int(f.Fd()), &st)
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("key file: %w", err)
	case !fi.Mode().IsRegular():
		return nil, fmt.Errorf("key file %s is no regular file", name)
	case fi.Mode().Perm()&others(&st) != 0:
		return nil, fmt.Errorf("key file %s has mode %04o, and other users may read or change it: chmod 600 %s", name, fi.Mode().Perm(), name)
	case fi.Size() > maxFileBytes:
		return nil, fmt.Errorf("key file %s has %d bytes, above the limit %d", name, fi.Size(), maxFileBytes)
	}
	b := make([]byte, fi.Size())
	if _, err := f.ReadAt(b, 0); err != nil {
		return nil, fmt.Errorf("key file: %w", err)
	}
	return entries(name, b)
}

func entries(name string, b []byte) (list []Entry, err error) {
	n := 0
	for line := range bytes.Lines(b) {
		n++
		fields := strings.Fields(string(line))
		if len(fields) == 0 || strings.HasPrefix(fields[0], "#") {
			continue
		}
		if len(fields) != 2 {
			return nil, fmt.Errorf("key file %s, line %d: %d words, want TENANT KEY", name, n, len(fields))
		}
		e := Entry{Tenant: fields[0]}
		if e.Key, err = parse(fields[1]); err != nil {
			return nil, fmt.Errorf("key file %s, line %d: %w", name, n, err)
		}
		if slices.Contains(list, e) {
			return nil, fmt.Errorf("key file %s, line %d: key %s of tenant %q is there twice", name, n, IDText(e.Key.ID()), e.Tenant)
		}
		if list = append(list, e); len(Of(list, e.Tenant)) > MaxKeys {
			return nil, fmt.Errorf("key file %s: tenant %q has more than %d keys", name, e.Tenant, MaxKeys)
		}
	}
	return list, nil
}

// Of are the keys of a tenant.
func Of(list []Entry, tenant string) (keys []Key) {
	for _, e := range list {
		if e.Tenant == tenant {
			keys = append(keys, e.Key)
		}
	}
	return keys
}

// ChangeFile replaces a key file by what change makes of its entries, in one step, beside others that do
// so. A file that is not there is made, for its owner alone; one that is there keeps owner and mode. Comments
// in it are lost. What it has written survives a power failure.
func ChangeFile(name string, change func([]Entry) ([]Entry, error)) error {
	name, err := target(name)
	if err != nil {
		return fmt.Errorf("key file: %w", err)
	}
	dir, err := os.Open(filepath.Dir(name))
	if err != nil {
		return fmt.Errorf("key file: %w", err)
	}
	defer dir.Close() // and so unlocks it
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("key file %s: lock its directory: %w", name, err)
	}
	list, err := ReadFile(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if list, err = change(list); err != nil {
		return err
	}
	text := []byte(fileHead)
	for _, e := range list {
		text = append(text, e.Tenant+" "+e.Key.Text()+"\n"...)
	}
	if _, err := entries(name, text); err != nil {
		return err
	}
	if err := errors.Join(replace(name, text), dir.Sync()); err != nil {
		return fmt.Errorf("key file %s: %w", name, err)
	}
	return nil
}

// target is the file that a name leads to, or will.
func target(name string) (string, error) {
	to, err := filepath.EvalSymlinks(name)
	if errors.Is(err, fs.ErrNotExist) {
		if _, lerr := os.Lstat(name); errors.Is(lerr, fs.ErrNotExist) {
			return name, nil
		}
	}
	return to, err
}

// replace gives a file another content. Owner and mode stay.
func replace(name string, text []byte) error {
	f, err := os.CreateTemp(filepath.Dir(name), ".quarry-key-*") // mode 0600
	if err != nil {
		return err
	}
	var was unix.Stat_t
	if unix.Stat(name, &was) == nil && (int(was.Uid) != os.Geteuid() || was.Mode&0o070 != 0) {
		err = errors.Join(f.Chown(int(was.Uid), int(was.Gid)), f.Chmod(fs.FileMode(was.Mode&0o777)))
	}
	if err == nil {
		_, err = f.Write(text)
	}
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}
