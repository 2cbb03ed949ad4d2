// Package kinds carries the meaning of errors over the socket of a pager.
package kinds

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/client"
)

// kinds are the errors that stay what they are for errors.Is, by their names in messages. The first that an error is, is its kind.
var kinds = []struct {
	name string
	err  error
}{
	{"unknown", client.ErrUnknown},
	{"argument", client.ErrArgument},
	{"no_name", client.ErrNoName},
	{"read_only", client.ErrReadOnly},
	{"unreachable", client.ErrUnreachable},
	{"bad_ref", client.ErrBadRef},
	{"fenced", client.ErrFenced},
	{"lease", client.ErrLease},
}

// Of is the kind of an error, "" if it has none.
func Of(err error) string {
	for _, k := range kinds {
		if errors.Is(err, k.err) {
			return k.name
		}
	}
	return ""
}

// reported is an error of a pager.
type reported struct {
	text string
	is   error // nil for an unknown kind
}

func (e *reported) Error() string { return e.text }
func (e *reported) Unwrap() error { return e.is }

// Error is the error that a pager has reported.
func Error(kind, text string) error {
	e := &reported{text: fmt.Sprintf("pager: %s", text)}
	for _, k := range kinds {
		if k.name == kind {
			e.is = k.err
		}
	}
	return e
}
