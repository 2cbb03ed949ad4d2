package redis

// Transactions are not supported. A client that sends MULTI, commands and EXEC in one
// write has sent the commands before it reads that MULTI is refused. So a refused MULTI
// puts the connection into the state refusing: every command is refused until EXEC,
// DISCARD or RESET, and EXEC answers EXECABORT, as Redis does for a transaction with a
// command that it could not queue. No command of such a transaction has an effect.

const (
	errNoTransactions = fault("ERR transactions are not supported: the commands up to EXEC or DISCARD are refused, none is executed")
	errRefusing       = fault("ERR not executed: transactions are not supported, and MULTI was refused; send DISCARD to go on")
	errNested         = fault("ERR MULTI calls can not be nested")
	errExecAbort      = fault("EXECABORT Transaction discarded because of previous errors.")
	errExecArity      = fault("EXECABORT Transaction discarded because of: wrong number of arguments for 'exec' command")
	errNoMultiExec    = fault("ERR EXEC without MULTI")
	errNoMultiDiscard = fault("ERR DISCARD without MULTI")
)

func multi(c *conn, _ [][]byte) error {
	if c.refusing {
		return errNested
	}
	c.refusing = true
	return errNoTransactions
}

func execute(c *conn, _ [][]byte) error {
	if !c.refusing {
		return errNoMultiExec
	}
	c.refusing = false
	return errExecAbort
}

func discard(c *conn, _ [][]byte) error {
	if !c.refusing {
		return errNoMultiDiscard
	}
	c.refusing = false
	c.ok()
	return nil
}
