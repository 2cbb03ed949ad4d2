package redis

import (
	"errors"
	"fmt"

	"github.com/quarrystore/quarry/btree"
	"github.com/quarrystore/quarry/client"
)

// progress is what the present command has changed, for the case that it ends with an error. It decides
// between the answers "not done", "done in part" and unknown; see explain.
//
// A command sets unsettled before it posts a change that another gateway may complete, and clears
// it when the outcome is known. A clean-up that fails after the change has taken effect is no
// reason for an error: see Server.leave.
type progress struct {
	part      bool // some of several keys or fields are changed for good
	unsettled bool // a change has been made or begun of which it is not known whether it counts
}

// settle records that the present change counts.
func (p *progress) settle() { *p = progress{part: true} }

// explain translates the error of the present command into a reply.
func (c *conn) explain(err error) string {
	// Before any fault: a fault that follows an unknown outcome does not say what became of it.
	if c.did.unsettled || errors.Is(err, client.ErrUnknown) {
		return "UNKNOWN the outcome is not known: it may have been done, at most once; read before you do it again"
	}
	how := "; not done"
	if c.did.part {
		how = "; done in part"
	}
	var f fault
	switch {
	case errors.As(err, &f):
		if f == errContended || c.did.part {
			return string(f) + how
		}
		return string(f)
	case errors.Is(err, btree.ErrBadKey):
		return fmt.Sprintf("ERR key or field is too long: this tree takes keys of up to %d bytes and fields of up to %d", c.s.maxKeyBytes(), c.s.maxFieldBytes())
	case errors.Is(err, btree.ErrTooLarge):
		return string(errTooLong)
	case errors.Is(err, client.ErrNoSpace):
		return "OOM no space left in the cluster" + how
	}
	c.s.cfg.Logger.Debug("gateway could not carry out a command", "error", err)
	return "ERR " + err.Error() + how
}
