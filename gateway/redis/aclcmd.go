package redis

import (
	"crypto/rand"
	hexcode "encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

func aclWhoami(c *conn, _ [][]byte) error {
	c.text(c.user.name)
	return nil
}

// sortedUsers are the users by name.
func (s *Server) sortedUsers() (out []*user) {
	s.acl.mu.Lock()
	defer s.acl.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(s.acl.users)) {
		out = append(out, s.acl.users[name])
	}
	return out
}

func aclUsers(c *conn, _ [][]byte) error {
	list := c.s.sortedUsers()
	c.array(len(list))
	for _, u := range list {
		c.text(u.name)
	}
	return nil
}

func aclList(c *conn, _ [][]byte) error {
	list := c.s.sortedUsers()
	c.array(len(list))
	for _, u := range list {
		c.text(u.String())
	}
	return nil
}

// ACL CAT [category]: the categories, or the commands of one.
func aclCat(c *conn, a [][]byte) error {
	if len(a) > 3 {
		return unknownSubcommand(c, a)
	}
	if len(a) == 2 {
		c.array(len(categories))
		for _, name := range categories {
			c.text(name)
		}
		return nil
	}
	category := lowered(a[2])
	if !slices.Contains(categories, category) {
		return fault("ERR Unknown category '" + string(word(a[2], 128)) + "'")
	}
	var names []string
	for _, cmd := range c.s.numbered {
		if slices.Contains(cmd.categories, category) {
			names = append(names, cmd.name)
		}
	}
	c.array(len(names))
	for _, name := range names {
		c.text(name)
	}
	return nil
}

// aclSetuser changes a copy of the rights and stores it when every rule has been applied, so that an error changes
// nothing and a command of the user sees either the former rights or the new ones.
func aclSetuser(c *conn, a [][]byte) error {
	name := string(a[2])
	if err := checkUser(name); err != nil {
		return err
	}
	s := c.s
	s.acl.mu.Lock()
	defer s.acl.mu.Unlock()
	u := s.acl.users[name]
	r := &rights{}
	switch {
	case u != nil:
		r = u.rights.Load().clone()
	case len(s.acl.users) == maxUsers:
		return fault(fmt.Sprintf("ERR %d users, the limit: delete some", maxUsers))
	default:
		u = &user{name: name}
	}
	for _, rule := range a[3:] {
		if err := s.apply(r, string(rule)); err != nil {
			return fault(fmt.Sprintf("ERR Error in ACL SETUSER modifier '%s': %v", word(rule, 256), err))
		}
	}
	u.rights.Store(s.ready(r))
	s.acl.users[name] = u
	c.ok()
	return nil
}

// ACL GETUSER name. Passwords are answered as their SHA-256, which is all that is kept of them.
func aclGetuser(c *conn, a [][]byte) error {
	u := c.s.user(string(a[2]))
	if u == nil {
		c.null()
		return nil
	}
	r := u.rights.Load()
	c.mapping(6)
	c.text("flags")
	flags := r.flags()
	c.set(len(flags))
	for _, f := range flags {
		c.text(f)
	}
	c.text("passwords")
	c.array(len(r.passwords))
	for _, p := range r.passwords {
		c.text(hexcode.EncodeToString(p[:]))
	}
	for _, field := range [][2]string{{"commands", r.commandText()}, {"keys", r.keyText()}, {"channels", r.channelText()}} {
		c.text(field[0])
		c.text(field[1])
	}
	c.text("selectors")
	c.array(0)
	return nil
}

// aclDeluser removes users and ends their connections. The rights are emptied first, so that a connection which
// still holds the user can call nothing. This connection, if it is one of them, ends after the reply.
func aclDeluser(c *conn, a [][]byte) error {
	s, gone := c.s, map[string]bool{}
	for _, name := range a[2:] {
		if string(name) == defaultUser {
			return fault("ERR The 'default' user cannot be removed")
		}
	}
	s.acl.mu.Lock()
	for _, name := range a[2:] {
		if u := s.acl.users[string(name)]; u != nil {
			u.rights.Store(s.ready(&rights{}))
			delete(s.acl.users, u.name)
			gone[u.name] = true
		}
	}
	s.acl.mu.Unlock()
	if gone[c.user.name] { // after the reply
		c.quit = true
		c.describe(func(d *about) { d.user = "" })
	}
	s.expel(gone)
	c.integer(int64(len(gone)))
	return nil
}

const maxPasswordBits = 4096

// ACL GENPASS [bits]: random hexadecimal digits, four bits each, rounded up.
func aclGenpass(c *conn, a [][]byte) error {
	bits := int64(256)
	if len(a) > 3 {
		return unknownSubcommand(c, a)
	}
	if len(a) == 3 {
		n, ok := parseInt(a[2])
		if !ok {
			return errNotInteger
		}
		if bits = n; n < 1 || n > maxPasswordBits {
			return fault("ERR ACL GENPASS argument must be the number of bits for the output password, a positive number up to 4096")
		}
	}
	b := make([]byte, maxPasswordBits/8)
	rand.Read(b)
	c.text(hexcode.EncodeToString(b)[:(bits+3)/4])
	return nil
}

// aclDryrun says whether a user may make a call, by the check that the call itself would meet.
func aclDryrun(c *conn, a [][]byte) error {
	u := c.s.user(string(a[2]))
	if u == nil {
		return fault("ERR User '" + string(word(a[2], maxUserBytes)) + "' not found")
	}
	cmd := c.s.lookup(a[3])
	args := a[3:]
	if cmd != nil && cmd.subs != nil && len(args) > 1 {
		cmd = cmd.subs[lowered(args[1])]
	}
	if cmd == nil {
		return fault("ERR Command '" + string(word(a[3], 128)) + "' not found")
	}
	if cmd.arity > 0 && len(args) != cmd.arity || len(args) < -cmd.arity {
		return wrongArity(cmd.name)
	}
	switch d := u.rights.Load().refuse(cmd, args); {
	case d == nil:
		c.ok()
	case d.reason == "command":
		c.text("This user has no permissions to run the '" + d.object + "' command")
	default:
		c.text("This user has no permissions to access the '" + d.object + "' " + d.reason)
	}
	return nil
}

const errNoACLFile = fault("ERR This Redis instance is not configured to use an ACL file. You may want to specify users via the ACL SETUSER command and then issue a CONFIG REWRITE (assuming you have a Redis configuration file set) in order to store users in the Redis configuration.")

// aclLoad reads the file of users; a file with an error changes nothing.
func aclLoad(c *conn, _ [][]byte) error {
	if c.s.acl.file == "" {
		return errNoACLFile
	}
	if err := c.s.loadUsers(); err != nil {
		return fault("ERR " + strings.ReplaceAll(err.Error(), "\n", ". ") + ". WARNING: ACL errors detected, no change to the previously active ACL rules was performed")
	}
	c.ok()
	return nil
}

// ACL SAVE. The reason of a failure is in the gateway's log alone: it may name paths.
func aclSave(c *conn, _ [][]byte) error {
	if c.s.acl.file == "" {
		return errNoACLFile
	}
	if err := c.s.saveUsers(); err != nil {
		c.s.cfg.Logger.Warn("gateway: the file of users was not written", "error", err)
		return fault("ERR There was an error trying to save the ACLs. Please check the server logs for more information")
	}
	c.ok()
	return nil
}

// ACL LOG [count | RESET]: refused commands and logins, the newest first. Equal ones are one entry with
// a count.
func aclLog(c *conn, a [][]byte) error {
	l, most := &c.s.acl, int64(10)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case len(a) > 3:
		return unknownSubcommand(c, a)
	case len(a) == 3 && equalFold(a[2], "reset"):
		l.log = nil
		c.ok()
		return nil
	case len(a) == 3:
		n, ok := parseInt(a[2])
		if !ok {
			return errNotInteger
		}
		most = max(n, 0)
	}
	list := l.log[:min(int64(len(l.log)), most)]
	now := time.Now()
	c.array(len(list))
	for _, e := range list {
		c.mapping(7)
		c.text("count")
		c.integer(e.count)
		for _, field := range [][2]string{{"reason", e.reason}, {"context", "toplevel"}, {"object", e.object}, {"username", e.user}} {
			c.text(field[0])
			c.text(field[1])
		}
		c.text("age-seconds")
		c.double(now.Sub(e.at).Seconds())
		c.text("client-info")
		c.text(e.client)
	}
	return nil
}

func unknownSubcommand(_ *conn, a [][]byte) error {
	return fault(fmt.Sprintf("ERR unknown subcommand or wrong number of arguments for '%s'. Try %s HELP.", word(a[1], 128), uppered(lowered(a[0]))))
}
