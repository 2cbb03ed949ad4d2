package rxevm

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

//go:embed guest/init.sh
var initScript []byte

//go:embed guest/main.sh
var mainScript []byte

// Setup says how to make an Image.
type Setup struct {
	// Install lets Prepare run apt-get install as root. A package that cannot be installed is
	// an error then. Without it Prepare uses what is present and downloads only the kernel.
	Install bool
	// Kernel is a version such as 6.1.0-56-amd64. Empty is the newest cached version or, if
	// none is cached, the newest in the archive.
	Kernel string
	// CacheDir holds kernels and initramfs; empty is quarry-rxe in the
	// user's cache directory.
	CacheDir string
	// Log receives lines about the progress; nil discards them.
	Log io.Writer
}

// Image is what every boot needs. It does not change after Prepare.
type Image struct {
	Kernel  string // version
	vmlinuz string
	vmlinux string // the same uncompressed, or empty
	initrd  string
	log     io.Writer
}

// Prepare makes sure that packages, kernel and initramfs are present. It returns a
// *MissingError if this machine cannot have them or must not install them.
func Prepare(ctx context.Context, s Setup) (*Image, error) {
	if s.Log == nil {
		s.Log = io.Discard
	}
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" {
		return nil, &MissingError{"an amd64 Linux host", "this is " + runtime.GOOS + "/" + runtime.GOARCH}
	}
	if err := installPackages(ctx, s.Install, s.Log); err != nil {
		return nil, err
	}
	if s.CacheDir == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			return nil, &MissingError{"a cache directory", err.Error() + "; set HOME or XDG_CACHE_HOME"}
		}
		s.CacheDir = filepath.Join(dir, "quarry-rxe")
	}
	unlock, err := lockDir(s.CacheDir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	k, err := findKernel(ctx, s.CacheDir, s.Kernel, s.Log)
	if missing := (*MissingError)(nil); errors.As(err, &missing) && canInstall(s.Install) {
		err = fmt.Errorf("cannot get %s: %s (QUARRY_NO_INSTALL=1 skips what needs it)", missing.What, missing.Remedy)
	}
	if err != nil {
		return nil, err
	}
	initrd, err := cachedInitramfs(ctx, s.CacheDir, k)
	if err != nil {
		return nil, err
	}
	vmlinux, err := cachedVmlinux(ctx, s.CacheDir, k)
	if err != nil {
		return nil, err
	}
	return &Image{Kernel: k.version, vmlinuz: k.vmlinuz, vmlinux: vmlinux, initrd: initrd, log: s.Log}, nil
}

// lockDir keeps concurrent Prepare calls, of this process and of others, from building the
// same file.
func lockDir(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return func() { f.Close() }, nil
}

// cachedInitramfs builds cache/initrd-VERSION-HASH.gz unless it exists. The hash covers the
// repository's files in it, so an edited script makes a new image.
func cachedInitramfs(ctx context.Context, cache string, k kernel) (string, error) {
	order, pmem, err := k.loadOrder()
	if err != nil {
		return "", err
	}
	busybox, err := os.ReadFile(staticBusybox())
	if err != nil {
		return "", err
	}
	h := sha256.New()
	fmt.Fprintf(h, "%s\n%s\n%x", k.version, strings.Join(slices.Concat(order, pmem), "\n"), sha256.Sum256(busybox))
	h.Write(initScript)
	h.Write(mainScript)
	name := filepath.Join(cache, fmt.Sprintf("initrd-%s-%x.gz", k.version, h.Sum(nil)[:6]))
	if file(name)() {
		return name, markUsed(name)
	}

	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	ar := cpioWriter{w: z}
	for _, dir := range []string{"bin", "dev", "proc", "sys", "mod", "new"} {
		ar.add(dir, 0o040755, nil)
	}
	ar.add("init", 0o100755, initScript)
	ar.add("main.sh", 0o100755, mainScript)
	ar.add("bin/busybox", 0o100755, busybox)
	for list, files := range map[string][]string{"order": order, "pmem": pmem} {
		var names []string
		for _, m := range files {
			content, err := readModule(ctx, filepath.Join(k.modules, m))
			if err != nil {
				return "", err
			}
			names = append(names, moduleName(m)+".ko")
			ar.add("mod/"+names[len(names)-1], 0o100644, content)
		}
		ar.add("mod/"+list, 0o100644, []byte(strings.Join(names, "\n")+"\n"))
	}
	if err := errors.Join(ar.close(), z.Close()); err != nil {
		return "", err
	}

	tmp := name + ".tmp"
	if err := os.WriteFile(tmp, packed.Bytes(), 0o644); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, name); err != nil {
		return "", err
	}
	return name, dropInitramfs(cache)
}

// keptInitramfs is how many images stay, some 3 MB each. Checkouts with different scripts share the cache: one must not delete
// the image that another is about to boot.
const keptInitramfs = 8

// markUsed makes an image the last one to be dropped.
func markUsed(name string) error {
	now := time.Now()
	return os.Chtimes(name, now, now)
}

// dropInitramfs removes all images but the keptInitramfs that were used last, and what a builder that died has left.
// Preconditions: the caller holds the cache lock.
func dropInitramfs(cache string) error {
	type image struct {
		name string
		used time.Time
	}
	var images []image
	entries, err := os.ReadDir(cache)
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		name := filepath.Join(cache, e.Name())
		if !strings.HasPrefix(e.Name(), "initrd-") {
			continue
		}
		info, err := e.Info()
		switch {
		case err != nil:
			errs = append(errs, err)
		case strings.HasSuffix(e.Name(), ".tmp"):
			errs = append(errs, os.Remove(name))
		default:
			images = append(images, image{name, info.ModTime()})
		}
	}
	slices.SortFunc(images, func(a, b image) int { return b.used.Compare(a.used) })
	for _, i := range images[min(len(images), keptInitramfs):] {
		errs = append(errs, os.Remove(i.name))
	}
	return errors.Join(errs...)
}

// readModule returns the module uncompressed: busybox's insmod knows only
// plain files.
func readModule(ctx context.Context, name string) ([]byte, error) {
	var unpack []string
	switch filepath.Ext(name) {
	case ".ko":
		return os.ReadFile(name)
	case ".xz":
		unpack = []string{"xz", "-dc", name}
	case ".zst":
		unpack = []string{"zstd", "-qdc", name}
	case ".gz":
		unpack = []string{"gzip", "-dc", name}
	default:
		return nil, fmt.Errorf("module %s: unknown compression", name)
	}
	out, err := exec.CommandContext(ctx, unpack[0], unpack[1:]...).Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", strings.Join(unpack, " "), err)
	}
	return out, nil
}

// cpioWriter writes the "newc" format, which the kernel unpacks. The tool cpio would need a
// tree of files on disk.
type cpioWriter struct {
	w     io.Writer
	inode int
	err   error
}

func (c *cpioWriter) add(name string, mode int, content []byte) {
	if c.err != nil {
		return
	}
	c.inode++
	// Header and content are each padded to four bytes.
	pad := func(n int) []byte { return make([]byte, (4-n%4)%4) }
	header := fmt.Sprintf("070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		c.inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name)+1, 0, name)
	for _, b := range [][]byte{[]byte(header), pad(len(header)), content, pad(len(content))} {
		if _, c.err = c.w.Write(b); c.err != nil {
			return
		}
	}
}

func (c *cpioWriter) close() error {
	c.add("TRAILER!!!", 0, nil)
	return c.err
}
