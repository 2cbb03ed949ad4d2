package worker

import (
	"bytes"
	"io"
	"strings"
	"sync"
)

// lastWords passes on what a process writes to its standard error, and keeps the line that says why it ends.
type lastWords struct {
	to   io.Writer
	mu   sync.Mutex
	line []byte // not complete yet, or the first bytes of a long one
	kept string
}

// maxWords bounds a line.
const maxWords = 500

// Write implements io.Writer.
func (l *lastWords) Write(b []byte) (int, error) {
	l.mu.Lock()
	for rest := b; len(rest) > 0; {
		part, after, whole := bytes.Cut(rest, []byte{'\n'})
		l.line = append(l.line, part[:min(len(part), maxWords-len(l.line))]...)
		if rest = after; whole {
			l.note()
			l.line = l.line[:0]
		}
	}
	l.mu.Unlock()
	return l.to.Write(b)
}

// noMemory is what the runtime says after a line that says more.
const noMemory = "fatal error: out of memory"

// note keeps a line that a process ends with: the runtime's, that of a panic, or the program's own.
func (l *lastWords) note() {
	for _, prefix := range []string{"fatal error: ", "panic: ", "runtime: out of memory", "quarry: ", "worker: "} {
		if line := string(l.line); strings.HasPrefix(line, prefix) && (line != noMemory || !strings.HasPrefix(l.kept, "runtime: out of memory")) {
			l.kept = line
		}
	}
}

// words are the line.
func (l *lastWords) words() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.kept
}
