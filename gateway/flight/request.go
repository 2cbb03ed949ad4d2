package flight

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	arrowflight "github.com/apache/arrow-go/v18/arrow/flight"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/quarrystore/quarry/btree"
)

const (
	// maxCommandBytes bounds the command of a descriptor.
	maxCommandBytes = 64 << 10
	// maxNeedleBytes bounds what values are searched for.
	maxNeedleBytes = 4 << 10
	// standardParts and maxParts are how many endpoints a FlightInfo has at most, without and with a number in the command.
	standardParts = 16
	maxParts      = 1024
)

// Request is what the command of a descriptor says, as JSON: which keys of which tree, and what of them. A field has a second form with base64, for bytes that are
// no text. Only Tree is required.
type Request struct {
	Tree       string `json:"tree"`
	From       text   `json:"from,omitzero"` // first key
	FromBase64 []byte `json:"from_base64,omitempty"`
	To         text   `json:"to,omitzero"` // end of the range, not included
	ToBase64   []byte `json:"to_base64,omitempty"`
	// Prefix takes the place of From and To.
	Prefix       text   `json:"prefix,omitzero"`
	PrefixBase64 []byte `json:"prefix_base64,omitempty"`
	// Contains leaves out entries whose value does not have these bytes in it.
	Contains       text   `json:"value_contains,omitzero"`
	ContainsBase64 []byte `json:"value_contains_base64,omitempty"`
	// Columns are the projection: key, value, version. Default: key, value.
	Columns []string `json:"columns,omitempty"`
	// Parts is how many endpoints there are at most; default 16.
	Parts int `json:"parts,omitempty"`
}

// text are bytes that are written as a string.
type text string

// pick is the one of two forms of a field that is given.
func pick(name string, s text, b []byte) ([]byte, error) {
	if s != "" && len(b) > 0 {
		return nil, fmt.Errorf("%s and %s_base64 are given: want one of them", name, name)
	}
	if s != "" {
		return []byte(s), nil
	}
	return b, nil
}

// selection is a Request that is checked: what is read of a tree.
type selection struct {
	tree     string
	from, to []byte // to nil: no bound
	contains []byte
	columns  []string
	parts    int
}

// requestOf reads a descriptor: PATH [tree], or CMD with a Request. Its errors have a code of gRPC.
func requestOf(d *arrowflight.FlightDescriptor) (selection, error) {
	q := Request{}
	switch {
	case d == nil:
		return selection{}, status.Error(codes.InvalidArgument, "no descriptor: want PATH [tree] or CMD with JSON")
	case d.Type == arrowflight.DescriptorPATH && len(d.Path) == 1:
		q.Tree = d.Path[0]
	case d.Type == arrowflight.DescriptorCMD:
		if err := parseCommand(d.Cmd, &q); err != nil {
			return selection{}, status.Errorf(codes.InvalidArgument, "command: %v", err)
		}
	default:
		return selection{}, status.Errorf(codes.InvalidArgument, "descriptor of type %v with %d path elements: want PATH [tree] or CMD with JSON", d.Type, len(d.Path))
	}
	s, err := q.selection()
	if err != nil {
		return s, status.Errorf(codes.InvalidArgument, "request: %v", err)
	}
	return s, nil
}

func parseCommand(b []byte, q *Request) error {
	if len(b) > maxCommandBytes {
		return fmt.Errorf("%d bytes, at most %d", len(b), maxCommandBytes)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(q); err != nil {
		return fmt.Errorf("want JSON such as {\"tree\":\"users\",\"columns\":[\"key\"]}: %w", err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return errors.New("there is more behind the JSON object")
	}
	return nil
}

// selection checks a Request.
func (q *Request) selection() (s selection, err error) {
	s.tree, s.columns, s.parts = q.Tree, q.Columns, q.Parts
	if s.tree == "" {
		return s, errors.New("no tree is named")
	}
	if len(s.columns) == 0 {
		s.columns = standardColumns
	}
	if s.parts == 0 {
		s.parts = standardParts
	}
	if s.parts < 1 || s.parts > maxParts {
		return s, fmt.Errorf("%d parts: want 1 to %d", s.parts, maxParts)
	}
	if err := checkColumns(s.columns); err != nil {
		return s, err
	}
	var prefix []byte
	for _, f := range []struct {
		name   string
		text   text
		base64 []byte
		most   int
		into   *[]byte
	}{
		{"from", q.From, q.FromBase64, btree.MaxKeyBytes, &s.from}, {"to", q.To, q.ToBase64, btree.MaxKeyBytes, &s.to},
		{"prefix", q.Prefix, q.PrefixBase64, btree.MaxKeyBytes, &prefix}, {"value_contains", q.Contains, q.ContainsBase64, maxNeedleBytes, &s.contains},
	} {
		if *f.into, err = pick(f.name, f.text, f.base64); err != nil {
			return s, err
		}
		if len(*f.into) > f.most {
			return s, fmt.Errorf("%s has %d bytes, at most %d", f.name, len(*f.into), f.most)
		}
		if len(*f.into) == 0 {
			*f.into = nil
		}
	}
	if prefix != nil {
		if s.from != nil || s.to != nil {
			return s, errors.New("prefix and a range are given: want one of them")
		}
		s.from, s.to = prefix, after(prefix)
	}
	return s, nil
}

// after is the first key behind all with a prefix; nil if there is none.
func after(prefix []byte) []byte {
	for n := len(prefix); n > 0; n-- {
		if prefix[n-1] < 0xff {
			b := bytes.Clone(prefix[:n])
			b[n-1]++
			return b
		}
	}
	return nil
}
