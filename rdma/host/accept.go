package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// Accept gives every connection of a listener to take, until the context ends,
// which makes it return nil, or the listener fails. It closes the listener. what
// names the fabric in errors.
func Accept(ctx context.Context, l net.Listener, what string, log *slog.Logger, take func(net.Conn)) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	for {
		c, err := l.Accept()
		switch {
		case err == nil:
			take(c)
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.ENOBUFS):
			// Connections that end will make room.
			log.Warn(what+" fabric: accept", "error", err)
			time.Sleep(10 * time.Millisecond)
		default:
			return fmt.Errorf("%s fabric on %v: %w", what, l.Addr(), err)
		}
	}
}
