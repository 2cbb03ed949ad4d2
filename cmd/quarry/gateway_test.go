package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/internal/identity"
	"github.com/quarrystore/quarry/internal/local"
	"github.com/quarrystore/quarry/verify/certs"
)

// redisGateway starts a gateway on the shared cluster.
func redisGateway(t *testing.T, args ...string) (p *local.Process, addr string) {
	p, err := local.Spawn(t.Context(), executable(t), append([]string{"gateway", "redis", "-C", cluster(t).URL, "--listen", "127.0.0.1:0"}, args...)...)
	require.NoError(t, err)
	t.Cleanup(func() { p.Stop() })
	return p, p.Ready["address"]
}

// redisTool runs redis-cli or redis-benchmark, or skips the test.
func redisTool(t *testing.T, stdin, tool, addr string, args ...string) string {
	path, err := exec.LookPath(tool)
	if err != nil {
		t.Skip(tool + " is not installed: apt-get install redis-tools")
	}
	at := []string{"-s", addr}
	if host, port, err := net.SplitHostPort(addr); err == nil {
		at = []string{"-h", host, "-p", port}
	}
	cmd := exec.CommandContext(t.Context(), path, append(at, args...)...)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	return string(out)
}

func TestGatewayWithRedisCLI(t *testing.T) {
	p, addr := redisGateway(t, "--tree", "cli", "--create", "--replicas", "2")
	cli := func(stdin string, args ...string) string { return redisTool(t, stdin, "redis-cli", addr, args...) }
	require.Equal(t, "PONG\n", cli("", "ping"))
	require.Equal(t, "OK\n", cli("", "set", "ada", "lovelace"))
	require.Equal(t, "lovelace\n", cli("", "get", "ada"))
	require.Equal(t, "1\n", cli("", "hset", "h", "a", "1"))
	require.Equal(t, "1) \"a\"\n2) \"1\"\n", cli("", "--no-raw", "hgetall", "h"))
	require.Contains(t, cli("", "-3", "hgetall", "h"), "a")
	binary := "\x00\r\n\xff binary"
	require.Equal(t, "OK\n", cli(binary, "-x", "set", "bin"))
	require.Equal(t, binary+"\n", cli("", "get", "bin"))
	require.Contains(t, cli("", "info"), "tree_name:cli")
	require.Contains(t, cli("", "--scan", "--pattern", "a*"), "ada")
	require.Contains(t, cli("", "nosuch"), "ERR unknown command 'nosuch'")
	// A second gateway sees the same, in another process, over a socket of its own.
	socket := filepath.Join(t.TempDir(), "s")
	q, err := local.Spawn(t.Context(), executable(t), "gateway", "redis", "-C", cluster(t).URL, "--listen", "unix:"+socket, "--tree", "cli")
	require.NoError(t, err)
	defer q.Stop()
	require.Equal(t, "lovelace\n", redisTool(t, "", "redis-cli", socket, "get", "ada"))
	require.Equal(t, "2\n", redisTool(t, "", "redis-cli", socket, "incrby", "n", "2"))
	require.Equal(t, "3\n", cli("", "incr", "n"))
	// A killed gateway leaves its socket, which does not stop the next one; one that
	// is served does.
	quarry(t, nil, "", "gateway", "redis", "-C", cluster(t).URL, "--listen", "unix:"+socket, "--tree", "cli").fails(t, exitFailed, "another program")
	require.NoError(t, q.Signal(syscall.SIGKILL))
	q.Wait()
	q, err = local.Spawn(t.Context(), executable(t), "gateway", "redis", "-C", cluster(t).URL, "--listen", "unix:"+socket, "--tree", "cli")
	require.NoError(t, err)
	defer q.Stop()
	require.Equal(t, "3\n", redisTool(t, "", "redis-cli", socket, "get", "n"))
	// Ctrl-C: clean, and quiet.
	require.NoError(t, p.Signal(syscall.SIGINT))
	require.Zero(t, p.Wait().ExitCode(), p.Log())
	require.Empty(t, p.Log())
	on(t, "fsck").ok(t)
}

func TestRedisBenchmark(t *testing.T) {
	_, addr := redisGateway(t, "--tree", "benchmark", "--create")
	out := redisTool(t, "", "redis-benchmark", addr, "-t", "get,set,mset,incr,hset", "-n", "2000", "-r", "500", "-P", "16", "-q")
	for _, what := range []string{"GET", "SET", "MSET (10 keys)", "INCR", "HSET"} {
		require.Contains(t, out, what+":")
	}
	require.NotContains(t, strings.ToLower(out), "error")
}

func TestBenchGateway(t *testing.T) {
	var out struct {
		Rows []struct {
			What, Op     string
			Clients, Ops int
		}
	}
	on(t, "bench", "--ops", "gateway", "--no-yardsticks", "--transport", "shm", "-D", "120ms", "--objects", "300", "--json").decode(t, &out)
	n := 0
	for _, r := range out.Rows {
		require.Positive(t, r.Ops, r)
		if r.What == "gateway shm" {
			n++
		}
	}
	require.Equal(t, 6, n, "GET and SET in three ways")
	require.NotContains(t, on(t, "name", "list").ok(t), "bench/gateway", "the tree is gone again")
}

// YCSB's workloads run against both servers; every answer is what it should be, and so is the number of keys in the end.
func TestBenchYCSB(t *testing.T) {
	var out struct {
		Rows []struct {
			What, Op     string
			Clients, Ops int
		}
	}
	on(t, "bench", "--ops", "ycsb", "--no-yardsticks", "--transport", "shm", "-D", "24ms", "--objects", "400", "--json").decode(t, &out)
	rows := map[string]bool{}
	for _, r := range out.Rows {
		require.Positive(t, r.Ops, r)
		rows[fmt.Sprint(r.What, " ", r.Op, " ", r.Clients)] = true
	}
	for _, kind := range []string{"hash", "string"} {
		for _, op := range []string{"load", "ycsb-a", "ycsb-b", "ycsb-c", "ycsb-d", "ycsb-e", "ycsb-f"} {
			for _, threads := range []int{1, 16} {
				require.Contains(t, rows, fmt.Sprint("gateway shm ", op, " ", kind, " ", threads))
			}
		}
	}
	require.NotContains(t, on(t, "name", "list").ok(t), "bench/gateway", "the tree is gone again")
}

func TestGatewayPassword(t *testing.T) {
	file := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(file, []byte("open sesame\nsecond line\n"), 0o600))
	_, addr := redisGateway(t, "--tree", "password", "--create", "--password-file", file)
	c, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer c.Close()
	r := bufio.NewReader(c)
	for _, step := range []struct{ say, hear string }{
		{"GET x", "-NOAUTH Authentication required.\r\n"}, {"AUTH wrong", "-WRONGPASS invalid username-password pair or user is disabled.\r\n"}, {`AUTH "open sesame"`, "+OK\r\n"}, {"GET x", "$-1\r\n"},
	} {
		_, err := fmt.Fprint(c, step.say+"\r\n")
		require.NoError(t, err)
		line, err := r.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, step.hear, line)
	}
}

func TestGatewayMistakes(t *testing.T) {
	url := cluster(t).URL
	empty := filepath.Join(t.TempDir(), "empty")
	require.NoError(t, os.WriteFile(empty, nil, 0o600))
	gateway := func(args ...string) result {
		return quarry(t, nil, "", append([]string{"gateway", "redis", "-C", url}, args...)...)
	}
	gateway("--tree", "nobody").fails(t, exitNotFound, "nobody", "--create")
	gateway().fails(t, exitUsage, "--tree")
	gateway("--tree", "x", "--password-file", "no-such-file").fails(t, exitUsage, "no-such-file")
	gateway("--tree", "x", "--password-file", empty).fails(t, exitUsage, "first line is empty")
	gateway("--tree", "x", "--max-clients", "0").fails(t, exitUsage, "--max-clients 0")
	gateway("--tree", "x", "--sweep-keys=-1").fails(t, exitUsage, "--sweep-keys -1")
	gateway("--tree", "x", "--create", "--replicas=-1").fails(t, exitUsage, "--replicas -1")
	ref := alloc(t, "not a tree")
	on(t, "name", "set", "notatree", ref).ok(t)
	r := gateway("--tree", "notatree")
	require.NotZero(t, r.code)
	require.Contains(t, r.err, "not a tree")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	gateway("--tree", "x", "--create", "--listen", l.Addr().String()).fails(t, exitFailed, l.Addr().String(), "--listen")
	require.Contains(t, quarry(t, nil, "", "gateway", "--help").ok(t), "redis")
	require.Contains(t, quarry(t, nil, "", "gateway", "redis", "--help").ok(t), "--password-file")
}

// redis-cli --tls, with a certificate for the port and one of the client's; bad flags are named.
func TestGatewayOverTLS(t *testing.T) {
	ca := certs.New(t, "prod")
	port, me := ca.Files(identity.Gateway, "g1", "127.0.0.1"), ca.Files(identity.Client, "app")
	p, err := local.Spawn(t.Context(), executable(t), "gateway", "redis", "-C", cluster(t).URL, "--listen", "none", "--tls-listen", "127.0.0.1:0",
		"--listen-cert", port.Cert, "--listen-key", port.Key, "--client-ca", ca.CA, "--tree", "tls", "--create")
	require.NoError(t, err)
	defer p.Stop()
	require.NotContains(t, p.Ready, "address")
	show := []string{"--tls", "--cacert", ca.CA, "--cert", me.Cert, "--key", me.Key}
	require.Equal(t, "OK\n", redisTool(t, "", "redis-cli", p.Ready["tls_address"], append(show, "set", "k", "v")...))
	require.Equal(t, "v\n", redisTool(t, "", "redis-cli", p.Ready["tls_address"], append(show, "get", "k")...))

	start := []string{"gateway", "redis", "-C", cluster(t).URL, "--tree", "tls"}
	for want, args := range map[string][]string{
		"give --tls-listen":   {"--listen", "none"},
		"are of --tls-listen": {"--client-ca", ca.CA},
		"go together":         {"--tls-listen", "127.0.0.1:0", "--listen-cert", port.Cert},
		"no certificate":      {"--tls-listen", "127.0.0.1:0"},
		"no such file":        {"--tls-listen", "127.0.0.1:0", "--listen-cert", "/nowhere", "--listen-key", port.Key},
		"or --client-ca":      {"--tls-listen", "0.0.0.0:0", "--listen-cert", port.Cert, "--listen-key", port.Key},
	} {
		quarry(t, nil, "", append(start[:len(start):len(start)], args...)...).fails(t, exitUsage, want)
	}
}

// Users of a file, by redis-cli; a port for other hosts needs a password for default.
func TestGatewayWithUsers(t *testing.T) {
	file := filepath.Join(t.TempDir(), "users.acl")
	require.NoError(t, os.WriteFile(file, []byte("user default on >root ~* &* +@all\nuser app on >secret ~app:* +@read +set\n"), 0o600))
	_, addr := redisGateway(t, "--tree", "users", "--create", "--acl-file", file)
	as := func(user, password string, args ...string) string {
		return redisTool(t, "", "redis-cli", addr, append([]string{"--no-auth-warning", "--user", user, "--pass", password}, args...)...)
	}
	require.Equal(t, "OK\n", as("app", "secret", "set", "app:k", "v"))
	require.Contains(t, as("app", "secret", "set", "k", "v"), "NOPERM")
	require.Contains(t, as("default", "root", "acl", "list"), "user app on #")
	require.Contains(t, redisTool(t, "", "redis-cli", addr, "get", "app:k"), "NOAUTH")

	start := []string{"gateway", "redis", "-C", cluster(t).URL, "--tree", "users"}
	quarry(t, nil, "", append(start, "--acl-file", "/nowhere")...).fails(t, exitUsage, "no such file")
	require.NoError(t, os.WriteFile(file, []byte("user app on >secret +nosuch\n"), 0o600))
	quarry(t, nil, "", append(start, "--acl-file", file)...).fails(t, exitUsage, "users.acl:1", "Unknown command")
	require.NoError(t, os.WriteFile(file, []byte("user app on >secret +get\n"), 0o600))
	quarry(t, nil, "", append(start, "--acl-file", file, "--listen", "0.0.0.0:0")...).fails(t, exitUsage, "--acl-file with a password for default")
}

// Two users of a gateway whose grants are in two tenants set the same key, and do not see each other's. A grant to read
// sets nothing, a prefix bounds keys, and a grant that is taken away counts while the connection is open.
func TestUsersOfAGatewayHaveGrants(t *testing.T) {
	p, err := local.Spawn(t.Context(), executable(t), "dev", "--listen", "127.0.0.1:0", "--nodes", "2", "--replicas", "1", "--region-bytes", "16MiB")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Stop()) })
	as := func(token string, args ...string) result {
		t.Helper()
		return quarry(t, []string{"QUARRY_CONTROLLER=" + p.Ready["url"], "QUARRY_TOKEN=" + token}, "", args...)
	}
	grant := func(tenant, user, rights, prefix string) {
		t.Helper()
		as("", "tenant", "grant", tenant, "--identity", "redis:"+user, "--rights", rights, "--prefix", prefix).ok(t)
	}
	for _, tenant := range []string{"shop", "bank"} {
		as("", "tenant", "create", tenant).ok(t)
	}
	grant("shop", "alice", "read,write,create", "")
	grant("bank", "bob", "read,write,create", "")
	grant("shop", "rita", "read", "")
	grant("shop", "petra", "read,write", "petra:")
	token := strings.TrimSpace(as("", "token", "create", "--role", "gateway").ok(t))
	acl := filepath.Join(t.TempDir(), "users")
	require.NoError(t, os.WriteFile(acl, []byte("user default on nopass ~* +@all\nuser alice on >a ~* +@all\nuser bob on >b ~* +@all\nuser rita on >r ~* +@all\nuser petra on >p ~* +@all\nuser nora on >n ~* +@all\n"), 0o600))
	keys := filepath.Join(t.TempDir(), "payload.keys") // of all tenants but bank, at first
	for _, tenant := range []string{"default", "shop"} {
		as("", "key", "payload", "create", keys, "--tenant", tenant).ok(t)
	}
	g, err := local.Spawn(t.Context(), executable(t), "gateway", "redis", "-C", p.Ready["url"], "--token", token, "--key-file", keys, "--listen", "127.0.0.1:0", "--tree", "keys", "--create", "--acl-file", acl, "--grants")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Stop()) })
	dial := func(user, password string) func(args ...string) string {
		nc, err := net.Dial("tcp", g.Ready["address"])
		require.NoError(t, err)
		t.Cleanup(func() { nc.Close() })
		in := bufio.NewReader(nc)
		line := func() string {
			l, err := in.ReadString('\n')
			require.NoError(t, err)
			return strings.TrimSuffix(l, "\r\n")
		}
		do := func(args ...string) string { // one or more commands, each an inline one
			_, err := fmt.Fprint(nc, strings.Join(args, "\r\n")+"\r\n")
			require.NoError(t, err)
			var out []string
			for range args {
				l := line()
				if l[0] == '$' && l != "$-1" {
					l = line()
				}
				out = append(out, l)
			}
			return strings.Join(out, " ")
		}
		if user != "" {
			require.Equal(t, "+OK", do("auth "+user+" "+password))
		}
		return do
	}
	require.Regexp(t, `^-ERR .* no key of tenant "bank": quarry key payload create`, dial("", "")("auth bob b"), "nothing is stored without its tenant's key")
	as("", "key", "payload", "create", keys, "--tenant", "bank").ok(t)
	plain, alice, bob, rita, petra, nora := dial("", ""), dial("alice", "a"), dial("bob", "b"), dial("rita", "r"), dial("petra", "p"), dial("nora", "n")
	require.Equal(t, "+OK", plain("set k gateway"))
	require.Equal(t, "+OK", alice("set k alice"))
	require.Equal(t, "+OK", bob("set k bob"))
	require.Equal(t, "gateway alice bob alice", plain("get k")+" "+alice("get k")+" "+bob("get k")+" "+rita("get k"))
	require.Equal(t, "+OK", bob("flushall"))
	require.Equal(t, "gateway alice $-1", plain("get k")+" "+alice("get k")+" "+bob("get k"))
	scan := []string{"kv", "scan", "--tenant", "shop", "-t", "keys"}
	require.Contains(t, as("", append(scan, "--key-file", keys)...).ok(t), "alice", "its record is in the tenant's tree")
	as("", scan...).fails(t, exitUsage, "no key", `tenant "shop"`, "--key-file")
	other := filepath.Join(t.TempDir(), "other.keys")
	as("", "key", "payload", "create", other, "--tenant", "shop").ok(t)
	as("", append(scan, "--key-file", other)...).fails(t, exitUsage, "no key", `this session in tenant "shop" has key`)

	require.Equal(t, "+OK :1 petra", petra("set petra:k petra", "exists petra:k", "get petra:k"))
	require.Equal(t, "petra", alice("get petra:k"))
	for call, c := range map[string]func(...string) string{
		"set k x": rita, "del k": rita, "flushdb": rita, "incr k": rita, "config set maxmemory 1": alice, "acl setuser alice +@all": alice, "client list": alice,
		"get k": petra, "getset k x": petra, "keys *": petra, "dbsize": petra, "mset petra:a 1 b 2": petra, "rename petra:k k": petra, "get nora": nora, "ping": nora, "set nora 1": nora,
	} {
		require.Regexp(t, "^-NOPERM", c(call), call)
	}
	require.Regexp(t, `^\+OK -NOPERM .* \+OK$`, petra("set petra:a 1", "set other 2", "set petra:b 3"), "SETs of a pipeline go to the tree together")
	require.NotContains(t, dial("petra", "p")("info keyspace"), "# Keyspace", "as DBSIZE: it has a grant for some keys")
	require.Contains(t, dial("alice", "a")("info keyspace"), "# Keyspace")
	require.Equal(t, "$-1", alice("get other"))

	as("", "tenant", "revoke-grant", "shop", "--identity", "redis:alice").ok(t)
	require.Eventually(t, func() bool { return strings.HasPrefix(alice("get k"), "-NOPERM") }, patience, 50*time.Millisecond)
	grant("bank", "nora", "read,write", "")
	require.Eventually(t, func() bool { return dial("nora", "n")("set k nora") == "+OK" }, patience, 50*time.Millisecond)
	require.Equal(t, "nora", bob("get k"))
	require.Regexp(t, "^-NOPERM", nora("get k"), "a connection from before has to give its password again")
	require.Equal(t, "+OK nora", nora("auth nora n", "get k"))
	grant("bank", "alice", "read", "") // in another tenant: the open connection stays out, a new one goes there
	require.Eventually(t, func() bool { return dial("alice", "a")("get k") == "nora" }, patience, 50*time.Millisecond)
	require.Regexp(t, "^-NOPERM", alice("get k"))
	require.Equal(t, "gateway", plain("get k"))
	require.Regexp(t, "^gateway", nora("reset", "get k")[len("+RESET "):], "as the user default again")
}
