package shm_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/rdma"
	"github.com/quarrystore/quarry/rdma/host"
	"github.com/quarrystore/quarry/rdma/shm"
	"golang.org/x/sys/unix"
)

// raw is a session of a client that asks for a descriptor as the SDK does, and then keeps no rule.
func raw(serial uint64) (socket *net.UnixConn, memory *os.File, err error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: os.Getenv("QUARRY_TEST_ADDR"), Net: "unixpacket"})
	if err != nil {
		return nil, nil, err
	}
	var b [256]byte
	n, err := c.Read(b[:])
	if err != nil {
		return nil, nil, err
	}
	challenge, err := host.DecodeChallenge(b[:n])
	if err != nil {
		return nil, nil, err
	}
	hello, err := host.NewHello(cluster.Ticket(serial, rdma.ReadWrite), 0, &challenge, host.Binding{})
	if err != nil {
		return nil, nil, err
	}
	page, err := ask(c, hello.Append(nil))
	if err != nil {
		return nil, nil, err
	}
	page.Close()
	open := host.OpenRequest{Region: 1, Epoch: 1}
	memory, err = ask(c, open.Append(nil))
	return c, memory, err
}

// ask sends a message and receives the descriptor of the answer.
func ask(c *net.UnixConn, message []byte) (*os.File, error) {
	if _, err := c.Write(message); err != nil {
		return nil, err
	}
	var b, oob [256]byte
	_, n, _, _, err := c.ReadMsgUnix(b[:], oob[:])
	if err != nil {
		return nil, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return nil, fmt.Errorf("%d control messages: %w", len(messages), err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fds[0]), "memory"), nil
}

func mapped(memory *os.File) []byte {
	mem, err := unix.Mmap(int(memory.Fd()), 0, 4<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		panic(err)
	}
	return mem
}

// scribble counts up a word for ever, and uses nothing of Go's runtime.
func scribble(mem []byte) {
	for {
		mem[0]++
		mem[8]--
	}
}

// hostile is a client that does not let the memory go when its session ends, as its role says.
func hostile(role string) int {
	serial := uint64(1)
	if text := os.Getenv("QUARRY_TEST_SERIAL"); text != "" {
		serial, _ = strconv.ParseUint(text, 10, 64)
	}
	socket, memory, err := raw(serial)
	if err != nil {
		fmt.Println("open:", err)
		return 1
	}
	switch role {
	case "raw-exit":
		return 0
	case "raw-write":
	case "raw-left": // has closed its connection, and goes on
		socket.Close()
	case "raw-descriptor": // writes by a descriptor, and maps nothing
		fmt.Println("started")
		var b [8]byte
		for i := uint64(1); ; i++ {
			binary.LittleEndian.PutUint64(b[:], i)
			if _, err := memory.WriteAt(b[:], 0); err != nil {
				return 1
			}
		}
	case "raw-fork", "raw-hand": // another process goes on; this one behaves, and outlives it
		return heir(role, socket, memory)
	case "raw-park": // lays the descriptor by in a socket's queue
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Sendmsg(pair[0], []byte{1}, unix.UnixRights(int(memory.Fd())), nil, 0)
		}
		if err != nil {
			fmt.Println("park:", err)
			return 1
		}
		memory.Close()
		fmt.Println("started")
		time.Sleep(time.Hour)
	case "raw-two": // a second session of the process entitles it
		if _, _, err := raw(2); err != nil {
			fmt.Println("open:", err)
			return 1
		}
	case "raw-unseen": // closes itself to inspection, but behaves
		if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
			return 1
		}
		memory.Close()
		fmt.Println("started")
		time.Sleep(time.Hour)
	}
	mem := mapped(memory)
	memory.Close()
	go func() {
		time.Sleep(10 * time.Millisecond)
		fmt.Println("started")
	}()
	scribble(mem)
	return 0
}

// heir leaves the memory to another process, lets go of it, and ends with its standard input.
func heir(role string, socket *net.UnixConn, memory *os.File) int {
	runtime.LockOSThread() // whose end is the child's
	mem := mapped(memory)
	var child int
	if role == "raw-fork" {
		pid, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
		if errno != 0 {
			fmt.Println("fork:", errno)
			return 1
		}
		if pid == 0 {
			_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, unix.PR_SET_PDEATHSIG, uintptr(unix.SIGKILL), 0)
			scribble(mem)
		}
		child = int(pid)
	} else {
		cmd := exec.Command(os.Args[0], "-test.run=XXX")
		cmd.Env = append(os.Environ(), "QUARRY_TEST_CLIENT=heir")
		cmd.ExtraFiles = []*os.File{memory}
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
		if err := cmd.Start(); err != nil {
			fmt.Println("exec:", err)
			return 1
		}
		child = cmd.Process.Pid
	}
	unix.Munmap(mem)
	memory.Close()
	socket.Close()
	fmt.Println("started")
	var status unix.WaitStatus
	if _, err := unix.Wait4(child, &status, 0, nil); err != nil {
		return 1
	}
	fmt.Println("child:", status.Signal())
	return 0
}

// member keeps the protocol: it loses its session, opens another one, and goes on.
func member() int {
	ctx, d := context.Background(), shm.NewDialer()
	write := func(serial uint64, say string) error {
		c, err := d.Dial(ctx, os.Getenv("QUARRY_TEST_ADDR"), cluster.Ticket(serial, rdma.ReadWrite), 0)
		if err != nil {
			return err
		}
		w, err := c.Open(ctx, 1, 1)
		if err != nil {
			return err
		}
		var r rdma.Round
		for n := 0; r.Err() == nil; n++ {
			r.Reset()
			r.Chain(&rdma.Target{Conn: c, Window: w}).FetchAdd(8*serial, 1)
			rdma.Do(&r)
			if n == 10 {
				fmt.Println(say)
			}
		}
		return r.Err()
	}
	for serial := uint64(1); ; serial++ {
		if err := write(serial, fmt.Sprintf("session %d", serial)); !errors.Is(err, rdma.ErrRevoked) && !errors.Is(err, rdma.ErrBroken) {
			fmt.Println("ended:", err)
			return 1
		}
	}
}
