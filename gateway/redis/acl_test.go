package redis_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/quarrystore/quarry/gateway/redis"
	"github.com/quarrystore/quarry/verify/testcluster"
)

// names are the commands and subcommands of a gateway.
func names(p *peer) (out []string) {
	p.send(frame("COMMAND", "LIST"))
	for _, v := range p.reply().list {
		out = append(out, v.text)
	}
	return out
}

// Every command has the categories and the key positions that Redis's own has, and every category
// those commands.
func TestCategoriesAreThoseOfRedis(t *testing.T) {
	theirs, ours := dial(t, realRedis(t)), dial(t, gateway(t, redis.Config{}))
	details := func(p *peer, name string) (categories, keys string) {
		p.send(frame("COMMAND", "INFO", name))
		v := p.reply().list[0]
		if len(v.list) < 7 {
			return "", ""
		}
		return fmt.Sprint(v.list[6].sorted(1)), fmt.Sprint(v.list[3:6])
	}
	all := names(ours)
	require.Greater(t, len(all), 100)
	for _, name := range all {
		wantCategories, wantKeys := details(theirs, name)
		categories, keys := details(ours, name)
		if name == "client|setinfo" { // of Redis 7.2
			wantCategories, wantKeys = details(theirs, "client|setname")
		}
		require.Equal(t, wantCategories, categories, name)
		if !strings.Contains(name, "|") || strings.HasPrefix(name, "object") || strings.HasPrefix(name, "memory") {
			require.Equal(t, wantKeys, keys, name)
		}
	}
	require.Equal(t, theirs.cmd("ACL CAT"), ours.cmd("ACL CAT"))
	theirs.send(frame("ACL", "CAT"))
	for _, category := range theirs.reply().list {
		var want, got []string
		theirs.send(frame("ACL", "CAT", category.text))
		for _, v := range theirs.reply().list {
			if slices.Contains(all, v.text) {
				want = append(want, v.text)
			}
		}
		ours.send(frame("ACL", "CAT", category.text))
		for _, v := range ours.reply().list {
			if v.text != "client|setinfo" {
				got = append(got, v.text)
			}
		}
		require.ElementsMatch(t, want, got, category.text)
	}
}

// ownParts are what no two servers have in common.
var ownParts = regexp.MustCompile(`"id" :\d+|"age-seconds" [^ ]+|"client-info" "[^"]*"`)

// The same commands about users have the same answers, word for word.
func TestSameACLAnswersAsRedis(t *testing.T) {
	for _, proto := range []string{"2", "3"} {
		theirs, ours := dial(t, realRedis(t)), dial(t, gateway(t, redis.Config{}))
		hash := strings.Repeat("0123456789abcdef", 4)
		for _, line := range []string{
			"HELLO " + proto, "ACL WHOAMI", "ACL USERS", "ACL LIST", "ACL GETUSER default", "ACL GETUSER nobody", "ACL GETUSER", "ACL nosuch", "ACL",
			"ACL SETUSER a", "ACL GETUSER a", "ACL LIST", "ACL SETUSER a ON >pw #" + hash + " ~app:* %R~ro:* %W~wo:* %rW~b*", "ACL GETUSER a", "ACL LIST",
			"ACL SETUSER a <pw", "ACL SETUSER a <pw", "ACL SETUSER a !" + hash, "ACL SETUSER a !" + hash, "ACL SETUSER a #short", "ACL SETUSER a #" + strings.ToUpper(hash), "ACL GETUSER a",
			"ACL SETUSER a nopass", "ACL GETUSER a", "ACL SETUSER a >x", "ACL GETUSER a", "ACL SETUSER a resetpass", "ACL GETUSER a",
			"ACL SETUSER a +get +set -get", "ACL LIST", "ACL SETUSER a -set +get", "ACL LIST", "ACL SETUSER a -@all +config|get", "ACL LIST", "ACL SETUSER a nocommands", "ACL LIST",
			"ACL SETUSER a allcommands", "ACL LIST", "ACL SETUSER a +@all -flushall", "ACL LIST", "ACL SETUSER a -@all +@read -get +get", "ACL LIST",
			"ACL SETUSER a +nosuch", "ACL SETUSER a +@nosuch", "ACL SETUSER a +config|nosuch", "ACL SETUSER a what", "ACL SETUSER a %X~k", "ACL SETUSER a %~k", "ACL SETUSER a %Rk", "ACL SETUSER a ?",
			"ACL SETUSER a resetkeys", "ACL GETUSER a", "ACL SETUSER a %R~k", "ACL SETUSER a %W~k", "ACL GETUSER a", "ACL SETUSER a allkeys", "ACL SETUSER a ~k", "ACL GETUSER a",
			"ACL SETUSER a &ch* &ch2", "ACL LIST", "ACL SETUSER a allchannels", "ACL LIST", "ACL SETUSER a &x", "ACL SETUSER a resetchannels", "ACL LIST",
			"ACL SETUSER a reset", "ACL GETUSER a", "ACL LIST", "ACL SETUSER a on off on nosuch", "ACL GETUSER a",
			"ACL SETUSER b on nopass ~k* +get +set +copy +mget +client|id +acl|whoami +exists", "ACL DRYRUN b get k", "ACL DRYRUN b get x", "ACL DRYRUN b del k", "ACL DRYRUN b get", "ACL DRYRUN b nosuch", "ACL DRYRUN c get k",
			"ACL DRYRUN b set k v get", "ACL DRYRUN b client id", "ACL DRYRUN b client list", "ACL DRYRUN b auth x",
			"ACL GENPASS x", "ACL GENPASS 0", "ACL GENPASS 4097", "ACL CAT nosuch", "ACL CAT a b", "ACL SAVE", "ACL LOAD", "ACL DELUSER default", "ACL DELUSER nobody", "ACL DELUSER a nobody", "ACL USERS",
			"AUTH", "AUTH x", "AUTH default", "AUTH nobody x", "AUTH b anything", "ACL WHOAMI", "GET k", "GET x", "SET k v", "DEL k", "MGET k1 k2 x", "EXISTS x", "COPY k x", "COPY k k2", "CLIENT LIST", "CONFIG GET x", "CONFIG NOSUCH",
			"NOSUCH", "GET", "PING", "ECHO x", "SELECT 1", "HELLO " + proto, "HELLO " + proto + " AUTH default x", "ACL WHOAMI", "ACL LOG", "ACL SETUSER b allkeys", "RESET", "ACL WHOAMI", "ACL LOG RESET", "ACL LOG", "ACL LOG x", "ACL LOG 0",
			"HELLO " + proto + " AUTH b x", "ACL WHOAMI", "QUIT",
		} {
			want, got := ownParts.ReplaceAllString(theirs.cmd(line), "own"), ownParts.ReplaceAllString(ours.cmd(line), "own")
			require.Equal(t, want, got, "RESP%s: %s", proto, line)
		}
	}
}

// Random rules let the same commands on the same keys as Redis's.
func TestSameRightsAsRedis(t *testing.T) {
	theirs, ours := dial(t, realRedis(t)), dial(t, gateway(t, redis.Config{}))
	rnd := rand.New(rand.NewPCG(3, 5))
	all := names(ours)
	all = slices.DeleteFunc(all, func(n string) bool { return n == "client|setinfo" })
	var commands []string
	for _, n := range all {
		for _, keys := range []string{"k1 x1 k2", "k1 k2 x1", "r1 w1 r2 w2", "w1 r1 w2", "x", "", "k1 v get", "r1 v get", "w1 v get"} {
			commands = append(commands, strings.ReplaceAll(n, "|", " ")+" "+keys)
		}
	}
	atom := func() string {
		switch rnd.IntN(8) {
		case 0:
			return []string{"+", "-"}[rnd.IntN(2)] + "@" + []string{"read", "write", "keyspace", "hash", "string", "fast", "slow", "dangerous", "admin", "connection", "all", "list"}[rnd.IntN(12)]
		case 1:
			return []string{"allkeys", "resetkeys", "reset", "nocommands", "allcommands", "on"}[rnd.IntN(6)]
		case 2:
			return []string{"~k*", "%R~r*", "%W~w*", "~?[12]", "%W~r*", "%RW~x"}[rnd.IntN(6)]
		}
		return []string{"+", "-"}[rnd.IntN(2)] + all[rnd.IntN(len(all))]
	}
	rounds := 150
	if testing.Short() {
		t.Log("-short: fewer users")
		rounds = 20
	}
	for range rounds {
		line := "ACL SETUSER u"
		for range 1 + rnd.IntN(6) {
			line += " " + atom()
		}
		require.Equal(t, theirs.cmd(line), ours.cmd(line), line)
		var out []byte
		var sent []string
		for range 200 {
			c := commands[rnd.IntN(len(commands))]
			sent = append(sent, c)
			out = append(out, frame(append([]string{"ACL", "DRYRUN", "u"}, strings.Fields(c)...)...)...)
		}
		theirs.send(out)
		ours.send(out)
		for _, c := range sent {
			want, got := theirs.reply().String(), ours.reply().String()
			require.Equal(t, want, got, "%s\nDRYRUN u %s", line, c)
		}
	}
}

// Rights count for connections that are open, in pipelines too; a deleted user's connections end.
func TestRightsChangeAtOnce(t *testing.T) {
	addr := gateway(t, redis.Config{Password: "root"})
	admin, p := dial(t, addr), dial(t, addr)
	require.Equal(t, "-NOAUTH Authentication required.", p.cmd("ACL WHOAMI"))
	require.Equal(t, "-WRONGPASS invalid username-password pair or user is disabled.", p.cmd("AUTH app secret"))
	require.Equal(t, "+OK", admin.cmd("AUTH root"))
	require.Equal(t, "+OK", admin.cmd("ACL SETUSER app on >secret ~app:* +@all -@dangerous"))
	require.Equal(t, "+OK", p.cmd("AUTH app secret"))
	require.Equal(t, `"app"`, p.cmd("ACL WHOAMI"))
	const refusedKey = "-NOPERM this user has no permissions to access one of the keys used as arguments"
	for range 300 { // a client that is alone is read by a thread of its own
		require.Equal(t, "+OK", p.cmd("SET app:k v"))
	}
	require.Equal(t, refusedKey, p.cmd("SET other v"))
	require.Equal(t, "-NOPERM this user has no permissions to run the 'flushall' command", p.cmd("FLUSHALL"))
	var out []byte
	for range 20 { // which go to the tree together, where that is allowed
		out = append(out, frame("SET", "app:k", "w")...)
		out = append(out, frame("SET", "other", "w")...)
		out = append(out, frame("GET", "other")...)
	}
	p.send(out)
	for range 20 {
		require.Equal(t, "+OK", p.reply().String())
		require.Equal(t, refusedKey, p.reply().String())
		require.Equal(t, refusedKey, p.reply().String())
	}
	require.Equal(t, ":0", admin.cmd("EXISTS other"))
	require.Contains(t, admin.cmd("CLIENT LIST"), "user=app")
	log := admin.cmd("ACL LOG")
	for _, want := range []string{`"count" :41 "reason" "key"`, `"object" "other" "username" "app"`, `"object" "flushall"`, `"reason" "auth" "context" "toplevel" "object" "AUTH"`, "addr="} {
		require.Contains(t, log, want)
	}

	require.Equal(t, "+OK", admin.cmd("ACL SETUSER app resetkeys ~new:*"))
	require.Equal(t, refusedKey, p.cmd("GET app:k"))
	require.Equal(t, "+OK", p.cmd("SET new:k v"))
	require.Equal(t, "+OK", admin.cmd("ACL SETUSER app off"))
	require.Equal(t, "+OK", p.cmd("SET new:k v"), "as in Redis: off is for AUTH")
	require.Equal(t, "-WRONGPASS invalid username-password pair or user is disabled.", dial(t, addr).cmd("AUTH app secret"))
	require.Equal(t, ":1", admin.cmd("ACL DELUSER app"))
	_, _ = p.Write(frame("SET", "new:k", "late"))
	p.gone()
	require.Equal(t, `"v"`, admin.cmd("GET new:k"))
	require.Equal(t, "+OK", admin.cmd("ACL SETUSER default off"))
	require.Equal(t, "-WRONGPASS invalid username-password pair or user is disabled.", dial(t, addr).cmd("AUTH root"))
}

// The file has the form of Redis's, is taken as a whole or not at all, and two gateways may share it.
func TestFileOfUsers(t *testing.T) {
	file := filepath.Join(t.TempDir(), "users.acl")
	require.NoError(t, os.WriteFile(file, []byte("\nuser default on >root ~* &* +@all\nuser app on >secret ~app:* +@read +set\n"), 0o600))
	_, tree := newTree(t, testcluster.Options{})
	start := func() *peer {
		s := redis.New(redis.Config{Tree: tree})
		require.NoError(t, s.UseACL(file))
		return dial(t, serve(t, s))
	}
	a, b := start(), start()
	require.Equal(t, "-NOAUTH Authentication required.", a.cmd("GET app:k"))
	require.Equal(t, "+OK", a.cmd("AUTH root"))
	require.Equal(t, "+OK", b.cmd("AUTH app secret"))
	require.Equal(t, "+OK", b.cmd("SET app:k v"))
	require.Equal(t, `*["aclfile" "`+file+`"]`, a.cmd("CONFIG GET aclfile"))
	list := a.cmd("ACL LIST")
	require.Equal(t, "+OK", a.cmd("ACL SETUSER late on nopass +ping"))
	require.Equal(t, "+OK", a.cmd("ACL SAVE"))
	require.NotContains(t, string(must(os.ReadFile(file))), "secret", "hashes alone")
	require.Equal(t, ":1", a.cmd("ACL DELUSER late"))
	require.Equal(t, list, a.cmd("ACL LIST"))
	require.Equal(t, "+OK", a.cmd("ACL LOAD"))
	require.Contains(t, a.cmd("ACL LIST"), "user late on nopass resetchannels -@all +ping")

	before := a.cmd("ACL LIST")
	for _, bad := range []string{"user x +nosuch", "usr x", "user", "user x (+get)", "user x on\nuser x on", "user x " + strings.Repeat("y", 1<<20)} {
		require.NoError(t, os.WriteFile(file, []byte("user good on\n"+bad+"\n"), 0o600))
		got := a.cmd("ACL LOAD")
		require.Contains(t, got, "-ERR", bad)
		require.Contains(t, got, filepath.Base(file))
		require.Equal(t, before, a.cmd("ACL LIST"), "nothing has changed")
		require.ErrorContains(t, redis.New(redis.Config{Tree: tree}).UseACL(file), filepath.Base(file))
	}
	require.NoError(t, os.Remove(file))
	require.Contains(t, a.cmd("ACL LOAD"), "no such file")
	require.Equal(t, "+OK", a.cmd("ACL SAVE"))
	require.True(t, bytes.Contains(must(os.ReadFile(file)), []byte("user app on #")))
}

func must(b []byte, err error) []byte {
	if err != nil {
		panic(err)
	}
	return b
}

// What one client may store in users has limits.
func TestUsersAreLimited(t *testing.T) {
	p := dial(t, gateway(t, redis.Config{}))
	require.Contains(t, p.cmd("ACL SETUSER "+strings.Repeat("n", 200)), "above the limit")
	line := []string{"ACL", "SETUSER", "u"}
	for i := range 2000 {
		line = append(line, fmt.Sprintf("~k%d", i))
	}
	require.Contains(t, p.do(line...), "Too many")
	for i := range 1100 {
		if got := p.cmd(fmt.Sprintf("ACL SETUSER u%d", i)); i > 1030 {
			require.Contains(t, got, "the limit")
		}
	}
}
