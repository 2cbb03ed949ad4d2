package redis_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/gateway/redis"
)

// TestRefusedTransactionHasNoEffect: commands between a refused MULTI and EXEC or
// DISCARD are not executed, whether the client waits for answers or sends all at once.
func TestRefusedTransactionHasNoEffect(t *testing.T) {
	for _, ending := range []string{"EXEC", "DISCARD", "RESET"} {
		for _, pipelined := range []bool{false, true} {
			p := dial(t, gateway(t, redis.Config{}))
			require.Equal(t, "+OK", p.cmd("SET s old"))
			lines := []string{"MULTI", "INCR n", "SET s new", "SET t new", "GET s", "GET s", "DEL s", "HSET h f v", "SELECT 3", "FLUSHALL", "NOSUCH", "CLIENT SETNAME me", ending}
			answers := make([]string, len(lines))
			var all []byte
			for i, line := range lines {
				if b := frame(strings.Fields(line)...); pipelined {
					all = append(all, b...)
				} else {
					p.send(b)
					answers[i] = p.reply().String()
				}
			}
			if pipelined {
				p.send(all)
				for i := range answers {
					answers[i] = p.reply().String()
				}
			}
			for i, a := range answers[:len(answers)-1] {
				require.Equal(t, byte('-'), a[0], "%s: %s", lines[i], a)
			}
			want := map[string]string{"EXEC": "-EXECABORT Transaction discarded because of previous errors.", "DISCARD": "+OK", "RESET": "+RESET"}
			require.Equal(t, want[ending], answers[len(answers)-1])
			require.Equal(t, `"old"`, p.cmd("GET s"))
			require.Equal(t, ":0", p.cmd("EXISTS n t h"))
			require.Equal(t, ":1", p.cmd("INCR n"), "the connection works on")
			require.Equal(t, "-ERR EXEC without MULTI", p.cmd("EXEC"))
		}
	}
}

// TestRefusedTransactionAsRedis: EXEC, DISCARD and a second MULTI answer what Redis
// answers in a transaction that it refuses, for a command that it does not know.
func TestRefusedTransactionAsRedis(t *testing.T) {
	a, b := dial(t, realRedis(t)), dial(t, gateway(t, redis.Config{}))
	for _, step := range []struct {
		cmd  string
		same bool
	}{
		{"EXEC", true}, {"DISCARD", true}, {"EXEC x", true}, {"MULTI", false}, {"NOSUCH", true}, {"MULTI", true}, {"INCR n", false}, {"EXEC", true}, {"EXISTS n", true}, {"EXEC", true},
		{"MULTI", false}, {"INCR n", false}, {"DISCARD", true}, {"EXISTS n", true}, {"MULTI x", true}, {"INCR n", true}, {"MULTI", false}, {"GET", true}, {"RESET", true}, {"EXEC", true}, {"INCR n", true},
	} {
		theirs, ours := a.cmd(step.cmd), b.cmd(step.cmd)
		if step.same {
			require.Equal(t, theirs, ours, step.cmd)
		}
	}
}
