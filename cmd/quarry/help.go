package main

// helpCmd is quarry help COMMAND, the same as quarry COMMAND --help.
type helpCmd struct {
	Command []string `arg:"" optional:"" help:"The command."`
}

func (h *helpCmd) Run(a *app) error {
	_, err := a.parser.Parse(append(h.Command, "--help")) // prints, and ends the command
	return usageError{err}
}
