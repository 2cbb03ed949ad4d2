package rxevm

import (
	"bytes"
	"io"
	"sync"
)

// linePrefix writes whole lines, each with a prefix, so that two machines can share a
// terminal. A line without an end is written in pieces of maxLine.
type linePrefix struct {
	mu     *sync.Mutex
	w      io.Writer
	prefix string
	line   []byte
}

const maxLine = 64 << 10

func (l *linePrefix) Write(p []byte) (int, error) {
	l.line = append(l.line, p...)
	for {
		i := bytes.IndexByte(l.line, '\n')
		if i < 0 {
			if len(l.line) < maxLine {
				return len(p), nil
			}
			i = len(l.line) - 1
		}
		if err := l.emit(l.line[:i+1]); err != nil {
			return 0, err
		}
		l.line = append(l.line[:0], l.line[i+1:]...)
	}
}

// flush writes the last line if it has no newline.
func (l *linePrefix) flush() error {
	if len(l.line) == 0 {
		return nil
	}
	defer func() { l.line = nil }()
	return l.emit(append(l.line, '\n'))
}

func (l *linePrefix) emit(line []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, err := l.w.Write(append([]byte(l.prefix), line...))
	return err
}
