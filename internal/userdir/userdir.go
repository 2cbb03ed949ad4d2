// Package userdir is the folder in which processes of one user on this host find each other: the
// shm sockets of storage nodes that have no path of their own, and the token of quarry dev.
//
// It is in the folder for temporary files. There itself, every user of the host could make files
// with the names that others look for.
package userdir

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Path of the folder.
func Path() string { return filepath.Join(os.TempDir(), fmt.Sprintf("quarry-%d", os.Getuid())) }

// Make makes the folder, and refuses one in which another user could put files. Other users may
// look into it.
func Make() error {
	dir := Path()
	if err := os.Mkdir(dir, 0o700); err == nil {
		return os.Chmod(dir, 0o755) // the umask may forbid it
	} else if !errors.Is(err, os.ErrExist) {
		return err
	}
	return check(dir)
}

func check(dir string) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Getuid() || st.Mode&0o022 != 0 {
		return fmt.Errorf("%s: it is not a folder that only user %d may write: remove it", dir, os.Getuid())
	}
	return nil
}

func tokenFile(port string) string { return filepath.Join(Path(), "dev-"+port+".token") }

// KeepToken writes the token of a controller at an address for this user's processes alone, and
// returns the file.
func KeepToken(address, token string) (file string, err error) {
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", err
	}
	if err := Make(); err != nil {
		return "", err
	}
	file = tokenFile(port)
	if err := os.WriteFile(file+".new", []byte(token+"\n"), 0o600); err != nil {
		return "", err
	}
	return file, os.Rename(file+".new", file)
}

// Token is what KeepToken has kept for the controller at an address of this host; "" for another
// address, or if there is none.
func Token(address string) string {
	host, port, err := net.SplitHostPort(address)
	if ip := net.ParseIP(host); err != nil || host != "localhost" && (ip == nil || !ip.IsLoopback()) || check(Path()) != nil {
		return ""
	}
	b, err := os.ReadFile(tokenFile(port))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
