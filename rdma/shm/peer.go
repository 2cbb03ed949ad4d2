package shm

import (
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// rightPeer refuses a process that has put its socket where a node's was: the peer is run by root,
// by this user, or by the owner of the socket's folder.
func rightPeer(socket *net.UnixConn, path string) error {
	raw, err := socket.SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	var sockErr error
	if err := raw.Control(func(fd uintptr) { peer, sockErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return err
	}
	if sockErr != nil {
		return fmt.Errorf("the socket's peer: %w", sockErr)
	}
	var dir unix.Stat_t
	if err := unix.Stat(filepath.Dir(path), &dir); err != nil {
		return fmt.Errorf("the socket's folder: %w", err)
	}
	return trusted(peer.Uid, uint32(os.Getuid()), dir.Uid)
}

// trusted refuses a server that another user could have put in the node's place.
func trusted(peer, self, owner uint32) error {
	if peer == 0 || peer == self || peer == owner {
		return nil
	}
	return fmt.Errorf("its process is run by user %d, which is neither root, user %d, nor the owner of the socket's folder (user %d)", peer, self, owner)
}
