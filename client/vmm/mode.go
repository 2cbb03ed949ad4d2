package vmm

import (
	"fmt"

	"github.com/quarrystore/quarry/client"
)

// Mode is what the stores into a mapping are.
type Mode string

// The modes.
const (
	// Release: stores are the space's. Programs of this host see them at once, those of other hosts behind a Release here and an Acquire there.
	Release Mode = "release"
	// Private: stores are this mapping's own, and never the space's. Pages that were stored into are memory of the program, beyond the pager's budget.
	Private Mode = "private"
)

// Check says why a mode cannot be used.
func (m Mode) Check() error {
	switch m {
	case Release, Private:
		return nil
	case "exclusive":
		return fmt.Errorf("%w: mode exclusive needs a space of checksummed pages, and there are none: use release", client.ErrArgument)
	case "direct":
		return fmt.Errorf("%w: mode direct is not offered: a node could not take plain memory back from a program without killing it: use release", client.ErrArgument)
	}
	return fmt.Errorf("%w: mode %q: want release or private", client.ErrArgument, string(m))
}
