package shm

import (
	"fmt"
	"net"
	"os"

	"github.com/quarrystore/quarry/rdma"
	"golang.org/x/sys/unix"
)

// maxMessage is more than any message of the protocol: a longer one is cut off
// by the socket and then refused for its size.
const maxMessage = 256

// bell is the message by which a client wakes the node's end of its mailbox: see package msg.
var bell = []byte{1}

// send writes one message, with a descriptor if f is not nil.
func send(c *net.UnixConn, b []byte, f *os.File) error {
	var rights []byte
	if f != nil {
		rights = unix.UnixRights(int(f.Fd()))
	}
	n, _, err := c.WriteMsgUnix(b, rights, nil)
	if err == nil && n != len(b) {
		err = fmt.Errorf("%w: message cut short", rdma.ErrBroken)
	}
	return err
}

// receiveBytes is the memory that receive needs: for a message, and for descriptors behind it.
const receiveBytes = maxMessage + 64

// receive reads one message and the descriptor that came with it, if any, by way of a buffer of receiveBytes. It
// closes what it was not promised.
func receive(c *net.UnixConn, buf []byte) ([]byte, *os.File, error) {
	b, oob := buf[:maxMessage], buf[maxMessage:]
	n, oobn, flags, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return nil, nil, err
	}
	var fds []int
	if oobn > 0 {
		fds = descriptors(oob[:oobn])
	}
	if n == 0 || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 || len(fds) > 1 {
		for _, fd := range fds {
			unix.Close(fd)
		}
		if n == 0 {
			return nil, nil, net.ErrClosed
		}
		return nil, nil, fmt.Errorf("%w: malformed message on the shm socket", rdma.ErrBroken)
	}
	if len(fds) == 1 {
		return b[:n], os.NewFile(uintptr(fds[0]), "received"), nil
	}
	return b[:n], nil, nil
}

// descriptors are the files that a message has brought.
func descriptors(oob []byte) (fds []int) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range messages {
		if got, err := unix.ParseUnixRights(&messages[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	for _, fd := range fds {
		unix.CloseOnExec(fd)
	}
	return fds
}
