package main

import (
	"archive/tar"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// source is a file or a folder, and where it goes in the archive.
type source struct{ from, to string }

// pack writes an archive whose names begin with top. Go files and what a version
// control system would ignore are left out of folders.
func (r *release) pack(name, top string, sources []source) (err error) {
	f, err := os.Create(filepath.Join(r.out, name))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	z := gzip.NewWriter(f)
	t := tar.NewWriter(z)
	for _, s := range sources {
		err := filepath.WalkDir(s.from, func(file string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() || strings.HasSuffix(file, ".go") {
				return err
			}
			rel, err := filepath.Rel(s.from, file)
			if err != nil {
				return err
			}
			return r.add(t, file, path.Join(top, s.to, filepath.ToSlash(rel)))
		})
		if err != nil {
			return err
		}
	}
	if err := errors.Join(t.Close(), z.Close()); err != nil {
		return err
	}
	r.files = append(r.files, name)
	return nil
}

func (r *release) add(t *tar.Writer, file, name string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	mode := int64(0o644)
	if st, err := os.Stat(file); err == nil && st.Mode()&0o100 != 0 {
		mode = 0o755
	}
	if err := t.WriteHeader(&tar.Header{Name: name, Size: int64(len(b)), Mode: mode, ModTime: r.when, Format: tar.FormatPAX}); err != nil {
		return err
	}
	_, err = t.Write(b)
	return err
}

// parts lists the modules in the program: CycloneDX 1.5.
func (r *release) parts(exe string) error {
	info, err := buildinfo.ReadFile(exe)
	if err != nil {
		return err
	}
	type component struct {
		Type    string `json:"type"`
		Ref     string `json:"bom-ref"`
		Name    string `json:"name"`
		Version string `json:"version"`
		URL     string `json:"purl"`
	}
	module := func(name, version string) component {
		url := "pkg:golang/" + name + "@" + version
		return component{"library", url, name, version, url}
	}
	list := []component{module("std", strings.TrimPrefix(info.GoVersion, "go"))}
	for _, d := range info.Deps {
		if d.Replace != nil {
			d = d.Replace
		}
		list = append(list, module(d.Path, d.Version))
	}
	top := module(info.Main.Path, r.version)
	top.Type = "application"
	b, err := json.MarshalIndent(map[string]any{
		"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
		"metadata":   map[string]any{"timestamp": r.when.Format(time.RFC3339), "component": top},
		"components": list,
	}, "", "  ")
	if err != nil {
		return err
	}
	name := "quarry-" + r.version + "-sbom.cdx.json"
	r.files = append(r.files, name)
	return os.WriteFile(filepath.Join(r.out, name), append(b, '\n'), 0o644)
}

// sums writes the checksums that sha256sum -c reads.
func (r *release) sums() error {
	slices.Sort(r.files)
	var text strings.Builder
	for _, name := range r.files {
		f, err := os.Open(filepath.Join(r.out, name))
		if err != nil {
			return err
		}
		h := sha256.New()
		_, err = io.Copy(h, f)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
		fmt.Fprintf(&text, "%s  %s\n", hex.EncodeToString(h.Sum(nil)), name)
	}
	return os.WriteFile(filepath.Join(r.out, "SHA256SUMS"), []byte(text.String()), 0o644)
}
