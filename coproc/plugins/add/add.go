// Package add is a function on one object (coproc.Call): it adds to a number.
package add

import (
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/quarrystore/quarry/coproc"
)

// Name and Summary of the function.
const (
	Name    = "add"
	Summary = "adds its argument, or 1, to the decimal number that an object holds, and answers the sum"
)

func init() { coproc.Register(Name, Summary, New) }

// New makes an instance.
func New() coproc.Plugin { return coproc.Func(Add) }

var errRange = errors.New("the sum is out of range")

// Add adds two decimal numbers of 64 bits. An empty object is 0.
func Add(object, args []byte) (next, answer []byte, err error) {
	have, add := int64(0), int64(1)
	if len(object) > 0 {
		if have, err = strconv.ParseInt(string(object), 10, 64); err != nil {
			return nil, nil, fmt.Errorf("the object holds %.40q, no decimal number", object)
		}
	}
	if len(args) > 0 {
		if add, err = strconv.ParseInt(string(args), 10, 64); err != nil {
			return nil, nil, fmt.Errorf("argument %.40q: want a decimal number", args)
		}
	}
	if add > 0 && have > math.MaxInt64-add || add < 0 && have < math.MinInt64-add {
		return nil, nil, errRange
	}
	next = strconv.AppendInt(nil, have+add, 10)
	return next, next, nil
}
