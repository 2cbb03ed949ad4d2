package vmm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/quarrystore/quarry/internal/pagerlink"
	"github.com/quarrystore/quarry/internal/userdir"
)

// defaultCommand starts a pager that ends when it has served no mapping for a minute.
var defaultCommand = []string{"quarry", "pager", "--idle", "1m"}

// startPatience bounds the wait for a pager that was started.
const startPatience = 30 * time.Second

// start starts a pager and connects to it. It goes on when this program ends. Several programs may start one at the same time: all but one of the pagers
// end at once, because the socket is taken.
func start(ctx context.Context, socket string, command []string) (*pagerlink.Conn, error) {
	if command == nil {
		command = defaultCommand
	}
	if len(command) == 0 {
		return nil, fmt.Errorf("%w: socket %s: start quarry pager", ErrNoPager, socket)
	}
	if err := userdir.Make(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoPager, err)
	}
	logName := filepath.Join(userdir.Path(), "pager.log")
	log, err := os.OpenFile(logName, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoPager, err)
	}
	defer log.Close()
	cmd := exec.Command(command[0], append(command[1:len(command):len(command)], "--socket", socket)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // an interrupt at this program's terminal does not end it
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("%w at %s, and none could be started (%w): start quarry pager", ErrNoPager, socket, err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	ctx, cancel := context.WithTimeout(ctx, startPatience)
	defer cancel()
	for {
		link, err := pagerlink.Dial(socket)
		if err == nil {
			return link, nil
		}
		select {
		case err := <-ended:
			if link, derr := pagerlink.Dial(socket); derr == nil { // of another program
				return link, nil
			}
			return nil, fmt.Errorf("%w at %s, and the one that was started has ended: %w: %s", ErrNoPager, socket, errors.Join(err), lastLine(logName))
		case <-ctx.Done():
			return nil, fmt.Errorf("%w at %s, and the one that was started does not serve it: %w: see %s", ErrNoPager, socket, ctx.Err(), logName)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// lastLine is the last line of a log.
func lastLine(name string) string {
	b, err := os.ReadFile(name)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return lines[len(lines)-1]
}
