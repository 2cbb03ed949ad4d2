package main

// helpCmd is --help for those who write it as a command.
type helpCmd struct {
	Command []string `arg:"" optional:"" help:"The command."`
}

func (h *helpCmd) Run(a *app) error {
	_, err := a.parser.Parse(append(h.Command, "--help")) // prints, and ends the command
	return usageError{err}
}
