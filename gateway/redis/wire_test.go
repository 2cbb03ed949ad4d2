package redis_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// TestMalformedAsRedis sends broken input to both: the same bytes come back, and the
// connection ends or goes on alike.
func TestMalformedAsRedis(t *testing.T) {
	theirs := realRedis(t)
	ours := gateway(t, redis.Config{})
	for _, in := range []string{
		"*x\r\n", "*1\r\nPING\r\n", "*1\r\n$x\r\n", "*1\r\n$-5\r\n", "*2\r\n$4\r\nECHO\r\n*1\r\n", "PING\r\n", "ping \"a b\"\r\n", "ECHO 'unbalanced\r\n", "ECHO \"x\"y\r\n",
		"\r\n\r\nPING\r\n", "*0\r\n*-1\r\nPING\r\n", "*1\r\n$4\r\nPING\r\n*1\r\n%4\r\n", "SET inline \"\\x41\\x42\"\r\nGET inline\r\n", "*2\r\n$3\r\nGET\r\n$-1\r\n", "NOSUCH\r\n",
		"*1\r\n$0\r\n\r\n", "*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$99999999999999999999\r\n", "PING\nPING\n", "*1\r\n$4\r\nPINGxx*1\r\n$4\r\nPING\r\n",
	} {
		var answers [2]string
		for i, addr := range []string{theirs, ours} {
			p := dial(t, addr)
			_, err := p.Write([]byte(in))
			require.NoError(t, err)
			if i == 0 || !strings.Contains(answers[0], "Protocol error") {
				// Not a word more from those who are cut off.
				_, _ = p.Write([]byte("\r\nECHO end\r\n"))
			}
			var got bytes.Buffer
			for !strings.HasSuffix(got.String(), "$3\r\nend\r\n") {
				b, err := p.r.ReadByte()
				if err != nil {
					break
				}
				got.WriteByte(b)
			}
			answers[i] = got.String()
		}
		require.Equal(t, answers[0], answers[1], "%.60q", in)
	}
}

// TestGarbage sends random bytes: the gateway goes on serving others.
func TestGarbage(t *testing.T) {
	addr := gateway(t, redis.Config{})
	rnd := rand.New(rand.NewPCG(5, 5))
	good := dial(t, addr)
	for range 200 {
		c, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		b := frame("SET", "k", "v")
		for range 1 + rnd.IntN(6) {
			b[rnd.IntN(len(b))] = byte(rnd.IntN(256))
		}
		_, _ = c.Write(b)
		c.Close()
		require.Equal(t, "+PONG", good.cmd("PING"))
	}
}

func TestPassword(t *testing.T) {
	s := redis.Config{Password: "open sesame"}
	addr := gateway(t, s)
	p := dial(t, addr)
	const who = "-NOAUTH Authentication required."
	require.Equal(t, who, p.cmd("PING"))
	require.Equal(t, who, p.cmd("GET k"))
	require.Equal(t, "-ERR wrong number of arguments for 'get' command", p.cmd("GET"))
	require.Contains(t, p.cmd("NOSUCH"), "unknown command")
	require.Contains(t, p.cmd("HELLO 3"), "-NOAUTH HELLO must be called")
	require.Equal(t, "-WRONGPASS invalid username-password pair or user is disabled.", p.do("AUTH", "wrong"))
	require.Equal(t, "-WRONGPASS invalid username-password pair or user is disabled.", p.do("AUTH", "somebody", "open sesame"))
	require.Equal(t, who, p.cmd("PING"))
	// The password and what follows it may come in one piece.
	p.send(bytes.Join([][]byte{frame("AUTH", "open sesame"), frame("SET", "k", strings.Repeat("x", 100_000)), frame("STRLEN", "k")}, nil))
	require.Equal(t, "+OK", p.reply().String())
	require.Equal(t, "+OK", p.reply().String())
	require.Equal(t, ":100000", p.reply().String())
	require.Equal(t, "+RESET", p.cmd("RESET"))
	require.Equal(t, who, p.cmd("PING"))
	require.Contains(t, p.do("HELLO", "3", "AUTH", "default", "open sesame", "SETNAME", "me"), "%[")
	require.Equal(t, `"me"`, p.cmd("CLIENT GETNAME"))
	// Who has not said it gets little memory.
	p = dial(t, addr)
	p.send([]byte("*2\r\n$4\r\nAUTH\r\n$100000\r\n"))
	require.Equal(t, "-ERR Protocol error: unauthenticated bulk length", p.reply().String())
	p.gone()
}

// TestPipelineInOrder: answers come in the order of commands, whatever goes to the
// tree together.
func TestPipelineInOrder(t *testing.T) {
	rounds := 150
	if testing.Short() {
		t.Log("-short: fewer rounds")
		rounds = 25
	}
	for _, far := range []bool{false, true} {
		addr := gateway(t, redis.Config{Far: func() bool { return far }})
		p := dial(t, addr)
		rnd := rand.New(rand.NewPCG(1, 9))
		model := map[string]string{}
		for range rounds {
			var out []byte
			var want []string
			for range 1 + rnd.IntN(120) {
				k := "k" + strconv.Itoa(rnd.IntN(30))
				switch rnd.IntN(8) {
				case 0:
					out = append(out, frame("ECHO", k)...)
					want = append(want, strconv.Quote(k))
				case 1, 2, 3:
					v := strings.Repeat(k, rnd.IntN(100))
					if rnd.IntN(50) == 0 {
						v = strings.Repeat("large", 100_000)
					}
					out = append(out, frame("SET", k, v)...)
					want = append(want, "+OK")
					model[k] = v
				default:
					out = append(out, frame("GET", k)...)
					if v, ok := model[k]; ok {
						want = append(want, strconv.Quote(v))
					} else {
						want = append(want, `"-1"`)
					}
				}
			}
			go p.Write(out) // answers may fill the pipe before all is sent
			for _, w := range want {
				if got := p.reply().String(); got != w {
					t.Fatalf("far %v: %.60s, want %.60s", far, got, w)
				}
			}
		}
	}
}

// TestRefusedInAPipeline: a SET that is refused among others is refused by itself.
func TestRefusedInAPipeline(t *testing.T) {
	for _, far := range []bool{false, true} {
		p := dial(t, gateway(t, redis.Config{Far: func() bool { return far }}))
		long := strings.Repeat("k", 2000)
		p.send(slices.Concat(frame("SET", "a", "1"), frame("SET", long, "2"), frame("SET", "a", "3"), frame("GET", "a"), frame("SET", "a", "4", "KEEPTTL"),
			frame("SET", "b", "5"), frame("SET", "b"), frame("SET", "b", "6"), frame("MGET", "a", "b")))
		for _, want := range []string{"+OK", "-ERR key or field is too long", "+OK", `"3"`, "+OK", "+OK", "-ERR wrong number of arguments for 'set' command", "+OK", `*["4" "6"]`} {
			require.Contains(t, p.reply().String(), want)
		}
	}
}

// TestGetAgain: GETs of one key that follow each other, and their neighbours.
func TestGetAgain(t *testing.T) {
	p := dial(t, gateway(t, redis.Config{}))
	other := dial(t, p.RemoteAddr().String())
	require.Equal(t, "+OK", p.cmd("SET a 1"))
	require.Equal(t, ":1", p.cmd("HSET h f v"))
	require.Equal(t, "+OK", p.cmd("CONFIG RESETSTAT"))
	var out []byte
	var want []string
	for _, line := range []string{"GET a", "GET a", "GET a", "GET", "GET a", "GET a b", "GET h", "GET h", "GET n", "GET n", "GET a", "SET a 2", "GET a", "GET a", "ECHO a", "get a"} {
		out = append(out, frame(strings.Fields(line)...)...)
		want = append(want, other.cmd(line))
	}
	for i, line := range []string{"1", "1", "1", "", "1", "", "", "", "", "", "1", "", "2", "2", "", "2"} {
		if line != "" {
			want[i] = strconv.Quote(line)
		}
	}
	require.Equal(t, "+OK", p.cmd("SET a 1"))
	require.Equal(t, "+OK", p.cmd("CONFIG RESETSTAT"))
	p.send(out)
	for i, w := range want {
		require.Equal(t, w, p.reply().String(), i)
	}
	require.Contains(t, p.cmd("INFO stats"), `keyspace_hits:8\r\nkeyspace_misses:2\r\n`)
	require.Contains(t, p.cmd("INFO stats"), "total_error_replies:4")
	// Values that change meanwhile do not go backwards.
	other.send(bytes.Repeat(frame("INCR", "n"), 2000))
	last := 0
	for range 100 {
		p.send(bytes.Repeat(frame("GET", "n"), 20))
		for range 20 {
			n, _ := strconv.Atoi(p.reply().text)
			require.GreaterOrEqual(t, max(n, 0), last)
			last = max(n, 0)
		}
	}
	for range 2000 {
		other.reply()
	}
	require.Equal(t, `"2000"`, p.cmd("GET n"))
}

// TestSlowReader: who does not read what it asked for is cut off, and takes bounded
// memory meanwhile.
func TestSlowReader(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree})
	s.SetLimits(200*time.Millisecond, 1<<30)
	addr := serve(t, s)
	p := dial(t, addr)
	require.Equal(t, "+OK", p.do("SET", "big", strings.Repeat("x", 1<<20)))
	slow := dial(t, addr)
	go func() {
		for range 2000 { // 2 GiB of answers
			if _, err := slow.Write(frame("GET", "big")); err != nil {
				return
			}
		}
	}()
	require.Eventually(t, func() bool { return s.Connections() == 1 }, patience, 5*time.Millisecond)
	require.Equal(t, "+PONG", p.cmd("PING"))
}

// TestClientVanishes in the middle of a pipeline, and of a command.
func TestClientVanishes(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree})
	addr := serve(t, s)
	watch := dial(t, addr)
	for i := range 50 {
		c, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		var out []byte
		for range 200 {
			out = append(out, frame("INCR", "n")...)
			out = append(out, frame("GET", "n")...)
		}
		out = append(out, "*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\nhalf"...)
		_, err = c.Write(out)
		require.NoError(t, err)
		if i%2 == 0 {
			_ = c.(*net.TCPConn).SetLinger(0) // with a reset
		}
		c.Close()
	}
	require.Eventually(t, func() bool { return s.Connections() == 1 }, patience, 5*time.Millisecond)
	require.Zero(t, s.Held())
	require.Equal(t, `"-1"`, watch.cmd("GET k"), "half a command does nothing")
	require.Equal(t, "+OK", watch.cmd("SET n 1"))
}

// TestMemoryOfInput: lengths that are announced take no memory, what comes is
// bounded over all connections.
func TestMemoryOfInput(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree})
	s.SetLimits(time.Minute, 3<<20)
	addr := serve(t, s)
	for range 20 {
		p := dial(t, addr)
		p.send([]byte("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$60000000\r\n"))
	}
	p := dial(t, addr)
	require.Equal(t, "+PONG", p.cmd("PING"))
	require.Zero(t, s.Held())
	go p.Write(frame("SET", "k", strings.Repeat("x", 30<<20)))
	require.Contains(t, p.reply().String(), "-ERR all clients together have sent too much")
	gone := func() bool { return s.Held() == 0 }
	require.Eventually(t, gone, patience, time.Millisecond, "what the refused one has sent")
	p = dial(t, addr)
	require.Equal(t, "+OK", p.do("SET", "k", strings.Repeat("x", 1<<20)), "others have room again")
	require.Equal(t, "+PONG", p.cmd("PING"))
	require.Eventually(t, gone, patience, time.Millisecond)
}

// TestMemoryOfAnswers: long answers that nobody reads are bounded over all
// connections.
func TestMemoryOfAnswers(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree})
	s.SetLimits(time.Minute, 48<<20)
	addr := serve(t, s)
	value := strings.Repeat("x", 30<<20)
	slow, other := dial(t, addr), dial(t, addr)
	go slow.Write(frame("SET", "k", value))
	require.Equal(t, "+OK", slow.reply().String())
	require.Eventually(t, func() bool { return s.Held() == 0 }, patience, time.Millisecond, "the command")
	slow.send(frame("GET", "k"))
	require.Eventually(t, func() bool { return s.Held() > 25<<20 }, patience, time.Millisecond, "nobody reads it")
	require.Contains(t, other.cmd("GET k"), "-TRYAGAIN clients have not read")
	require.Equal(t, ":31457280", other.cmd("STRLEN k"))
	require.Len(t, slow.reply().text, len(value))
	require.Eventually(t, func() bool { return s.Held() == 0 }, patience, time.Millisecond)
	other.send(frame("GET", "k"))
	require.Len(t, other.reply().text, len(value))
}

// TestSlowReaderDoesNotKeepTheGateway from ending.
func TestSlowReaderDoesNotKeepTheGateway(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree})
	s.SetLimits(time.Hour, 1<<30)
	addr := serve(t, s) // and its end, within the test's patience
	p := dial(t, addr)
	go p.Write(frame("SET", "k", strings.Repeat("x", 30<<20)))
	require.Equal(t, "+OK", p.reply().String())
	p.send(frame("GET", "k"))
	require.Eventually(t, func() bool { return s.Held() > 25<<20 }, patience, time.Millisecond)
}

func TestMaxClients(t *testing.T) {
	addr := gateway(t, redis.Config{MaxClients: 2})
	a, b := dial(t, addr), dial(t, addr)
	require.Equal(t, "+PONG", a.cmd("PING"))
	require.Equal(t, "+PONG", b.cmd("PING"))
	c := dial(t, addr)
	require.Equal(t, "-ERR max number of clients reached", c.reply().String())
	c.gone()
}

func TestReplyModes(t *testing.T) {
	p := dial(t, gateway(t, redis.Config{}))
	p.send(bytes.Join([][]byte{frame("CLIENT", "REPLY", "SKIP"), frame("SET", "a", "1"), frame("GET", "a"), frame("CLIENT", "REPLY", "OFF"), frame("SET", "a", "2"), frame("NOSUCH"),
		frame("CLIENT", "REPLY", "ON"), frame("GET", "a")}, nil))
	require.Equal(t, `"1"`, p.reply().String())
	require.Equal(t, "+OK", p.reply().String())
	require.Equal(t, `"2"`, p.reply().String())
}

// TestShutdown: the end of the context ends waiting connections and answers what
// has been asked.
func TestShutdown(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	p := dial(t, l.Addr().String())
	require.Equal(t, "+OK", p.cmd("SET a 1"))
	cancel()
	p.gone()
	select {
	case err := <-done:
		require.NoError(t, err)
	case <-time.After(patience):
		t.Fatal("Serve does not return")
	}
}

// TestAlone: a connection that is alone and busy is taken out of Go's poller, and comes
// back with nothing lost when it is idle, when its client reads slowly, when it ends,
// and when the gateway does.
func TestAlone(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			_, tree := newTree(t, testcluster.Options{})
			s := redis.New(redis.Config{Tree: tree})
			at := "127.0.0.1:0"
			if network == "unix" {
				at = filepath.Join(t.TempDir(), "s")
			}
			l, err := net.Listen(network, at)
			require.NoError(t, err)
			ctx, end := context.WithCancel(t.Context())
			defer end()
			done := make(chan error, 1)
			go func() { done <- s.Serve(ctx, l) }()
			addr := l.Addr().String()
			if network == "unix" {
				addr = "unix:" + at
			}
			p := dial(t, addr)
			busy := func() {
				t.Helper()
				require.Eventually(t, func() bool { return p.cmd("PING") == "+PONG" && s.Lingering() == 1 }, patience, time.Microsecond)
			}
			busy()
			require.Eventually(t, func() bool { return s.Lingering() == 0 }, patience, time.Millisecond, "idle")
			busy()
			large := strings.Repeat("0123456789", 400_000)
			require.Equal(t, "+OK", p.do("SET", "large", large))
			busy()
			p.send(bytes.Repeat(frame("GET", "large"), 10))
			require.Eventually(t, func() bool { return s.Lingering() == 0 }, patience, time.Millisecond, "nobody reads the answers")
			for range 10 {
				require.True(t, p.reply().text == large)
			}
			busy()
			p.send(frame("SET", "large", large)[:3_000_000]) // and never the rest
			p.Close()
			require.Eventually(t, func() bool { return s.Lingering() == 0 && s.Connections() == 0 }, patience, time.Millisecond, "the client leaves")
			p = dial(t, addr)
			busy()
			end()
			select {
			case err := <-done:
				require.NoError(t, err)
			case <-time.After(patience):
				t.Fatal("the gateway does not end")
			}
			p.gone()
			require.Zero(t, s.Lingering())
		})
	}
}

// TestWaitingForTheNextCommand: a connection that has been busy keeps a thread for a
// little while only.
func TestWaitingForTheNextCommand(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	s := redis.New(redis.Config{Tree: tree})
	addr := serve(t, s)
	peers := []*peer{dial(t, addr), dial(t, addr), dial(t, addr)}
	for range 500 {
		for _, p := range peers {
			require.Equal(t, "+PONG", p.cmd("PING"))
			require.LessOrEqual(t, s.Lingering(), 1+runtime.GOMAXPROCS(0))
		}
	}
	require.Eventually(t, func() bool { return s.Lingering() == 0 }, patience, time.Millisecond)
}

// TestCommandDocs: redis-cli asks for them when a person sits before it, and takes
// for granted that every command and subcommand has a group.
func TestCommandDocs(t *testing.T) {
	p := dial(t, gateway(t, redis.Config{}))
	p.cmd("HELLO 3")
	p.send(frame("COMMAND", "DOCS"))
	var walk func(v value) int
	walk = func(v value) (n int) {
		require.Equal(t, byte('%'), v.kind)
		for i := 0; i < len(v.list); i += 2 {
			n++
			entry := v.list[i+1]
			has := map[string]value{}
			for j := 0; j < len(entry.list); j += 2 {
				has[entry.list[j].text] = entry.list[j+1]
			}
			require.NotEmpty(t, has["group"].text, v.list[i].text)
			if subs, ok := has["subcommands"]; ok {
				n += walk(subs)
			}
		}
		return n
	}
	require.Greater(t, walk(p.reply()), 90)
	p.send(frame("COMMAND", "COUNT"))
	count := p.reply().text
	p.send(frame("COMMAND", "LIST"))
	names := p.reply().list
	names = slices.DeleteFunc(names, func(v value) bool { return strings.Contains(v.text, "|") })
	require.Equal(t, count, strconv.Itoa(len(names)))
	require.Equal(t, `*["config" "config|get" "config|help" "config|resetstat" "config|set"]`, p.cmd("COMMAND LIST FILTERBY PATTERN conf*"))
	require.Equal(t, "*[]", p.cmd("COMMAND LIST FILTERBY MODULE x"))
	for _, line := range []string{"x", "FILTERBY", "FILTERBY PATTERN", "FILTERBY FOO x", "FILTERBY MODULE x y"} {
		require.Equal(t, "-ERR syntax error", p.cmd("COMMAND LIST "+line))
	}
	for _, container := range []string{"CLIENT", "COMMAND", "CONFIG", "FUNCTION", "MEMORY", "OBJECT"} {
		require.Regexp(t, `^\*\[\+`+container+` <subcommand> \[<arg> \[value\] \[opt\] \.\.\.\]\. Subcommands are: \+.*\+HELP \+    Print this help\.\]$`, p.cmd(container+" help"))
		require.Equal(t, "-ERR wrong number of arguments for '"+strings.ToLower(container)+"|help' command", p.cmd(container+" HELP x"))
	}
	p.send(frame("COMMAND"))
	require.Equal(t, count, strconv.Itoa(len(p.reply().list)))
	require.Equal(t, `%["get" %["summary" "Get the value of a key" "group" "string"]]`, p.cmd("COMMAND DOCS get nosuch"))
	require.Contains(t, p.cmd("COMMAND INFO config|get"), "config|get")
	require.Contains(t, p.cmd("CLIENT LIST"), "cmd=client|list user=default")
	require.Contains(t, p.cmd("INFO"), "redis_version:7.0")
	require.NotContains(t, p.cmd("INFO server"), "connected_clients")
}

// TestQuit answers, then ends the connection; what follows is not done.
func TestQuit(t *testing.T) {
	addr := gateway(t, redis.Config{})
	p := dial(t, addr)
	p.send(append(append(frame("SET", "a", "1"), frame("QUIT")...), frame("SET", "a", "2")...))
	require.Equal(t, "+OK", p.reply().String())
	require.Equal(t, "+OK", p.reply().String())
	p.gone()
	require.Equal(t, `"1"`, dial(t, addr).cmd("GET a"))
}

// TestLimits of keys and values, said clearly.
func TestLimits(t *testing.T) {
	_, tree := newTree(t, testcluster.Options{})
	p := dial(t, serve(t, redis.New(redis.Config{Tree: tree})))
	most := tree.Limits().MaxKeyBytes
	key := strings.Repeat("k", most-1)
	require.Equal(t, "+OK", p.do("SET", key, "v"))
	require.Equal(t, `"v"`, p.do("GET", key))
	const long = "is too long: this tree takes keys of up to "
	for _, cmd := range [][]string{{"SET", key + "k", "v"}, {"GET", key + "k"}, {"INCR", key + "k"}, {"HSET", key + "k", "f", "v"}, {"DEL", key + "k"}, {"HSET", "h", key, "v"}, {"ZADD", "z", "1", key}} {
		require.Contains(t, p.do(cmd...), long+strconv.Itoa(most-1), cmd[0])
	}
	require.Equal(t, `"-1"`, p.do("HGET", "h", key), "no such field can be")
	require.Equal(t, ":0", p.cmd("EXISTS h z"), "nothing is left of what was refused")
	field := strings.Repeat("f", most-17)
	require.Equal(t, ":1", p.do("HSET", "h", field, "v"))
	require.Equal(t, ":1", p.do("ZADD", "z", "1", field))
	require.Equal(t, fmt.Sprintf("*[%q]", field), p.do("ZRANGE", "z", "0", "-1"))
	require.Equal(t, "-ERR string exceeds maximum allowed size (proto-max-bulk-len)", p.cmd("SETRANGE k 67108864 x"))
	if testing.Short() {
		t.Log("-short: no value of 64 MiB")
	} else {
		require.Equal(t, "-ERR string exceeds maximum allowed size (proto-max-bulk-len)", p.do("SET", "k", strings.Repeat("x", 64<<20)))
	}
	_, err := p.Write([]byte("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$67108865\r\n"))
	require.NoError(t, err)
	require.Equal(t, "-ERR Protocol error: invalid bulk length", p.reply().String())
	p.gone()
}

// TestLargeValues go through whole.
func TestLargeValues(t *testing.T) {
	p := dial(t, gateway(t, redis.Config{}))
	for _, n := range []int{255, 256, 257, 4096, 1 << 20, 5<<20 + 17} {
		v := bytes.Repeat([]byte{byte(n), '\r', '\n'}, n/3+1)
		go p.Write(frame("SET", "big", string(v)))
		require.Equal(t, "+OK", p.reply().String())
		p.send(frame("GET", "big"))
		got := p.reply()
		require.True(t, got.text == string(v), n)
	}
}
