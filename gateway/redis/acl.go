package redis

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// acl are the users of a gateway. mu guards users, against other changes and readers off the hot path:
// a connection holds its user.
type acl struct {
	file  string           // of UseACL; constant while the gateway serves
	mu    sync.Mutex       // guards users and log
	users map[string]*user // by name; normal is one of them
	// normal is the user default, which connections are until they give another name.
	normal *user
	log    []*aclEntry // newest first, at most maxLog
}

const (
	maxUsers     = 1024
	maxLog       = 128
	maxUserBytes = 128
	maxFileBytes = 1 << 20
	// sameEntry is how long a refusal adds to an entry that is there, as in Redis.
	sameEntry   = time.Minute
	defaultUser = "default"
)

// aclEntry is a refusal, or several alike.
type aclEntry struct {
	count                int64     // refusals alike, each within sameEntry of the one before
	reason, object, user string    // as denied; user: name of the caller
	at                   time.Time // of the latest
	client               string    // line of CLIENT LIST for the connection that was refused first
}

// initUsers makes the user default of the configuration.
func (s *Server) initUsers() {
	rules := []string{"on", "~*", "&*", "+@all", "nopass"}
	if s.cfg.Password != "" {
		rules = append(rules[:4], ">"+s.cfg.Password)
	}
	r := &rights{}
	for _, rule := range rules {
		if err := s.apply(r, rule); err != nil {
			panic(err) // it is one of those above
		}
	}
	s.acl.normal = &user{name: defaultUser}
	s.acl.normal.rights.Store(s.ready(r))
	s.acl.users = map[string]*user{defaultUser: s.acl.normal}
}

// UseACL reads the users of a file, which ACL LOAD reads again and ACL SAVE writes. Its form is that of
// Redis's aclfile. Call it before Serve.
func (s *Server) UseACL(file string) error {
	s.acl.file = file
	s.settings.values["aclfile"] = file
	return s.loadUsers()
}

// Open says whether a connection needs no password.
func (s *Server) Open() bool {
	r := s.acl.normal.rights.Load()
	return r.on && r.nopass
}

// readUsers reads a file of users, one a line: user NAME RULE...
func (s *Server) readUsers() (map[string]*rights, error) {
	f, err := os.Open(s.acl.file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if fi.Size() > maxFileBytes {
		return nil, fmt.Errorf("%s: %d bytes, above the limit %d", s.acl.file, fi.Size(), maxFileBytes)
	}
	out := map[string]*rights{}
	var bad []error
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, maxFileBytes)
	for n := 1; lines.Scan(); n++ {
		words := strings.Fields(lines.Text())
		if len(words) == 0 {
			continue
		}
		if words[0] != "user" || len(words) < 2 || checkUser(words[1]) != nil {
			bad = append(bad, fmt.Errorf("%s:%d: should start with user keyword followed by the username", s.acl.file, n))
			continue
		}
		if out[words[1]] != nil {
			bad = append(bad, fmt.Errorf("%s:%d: Duplicate user '%s' found", s.acl.file, n, words[1]))
			continue
		}
		r := &rights{}
		for _, rule := range words[2:] {
			if err := s.apply(r, rule); err != nil {
				bad = append(bad, fmt.Errorf("%s:%d: %w", s.acl.file, n, err))
				break
			}
		}
		out[words[1]] = s.ready(r)
	}
	if len(out) > maxUsers {
		bad = append(bad, fmt.Errorf("%s: %d users, above the limit %d", s.acl.file, len(out), maxUsers))
	}
	return out, errors.Join(append(bad, lines.Err())...)
}

// loadUsers makes the users those of the file, all or none of them. Connections of users that are gone,
// or have other rights, end.
func (s *Server) loadUsers() error {
	found, err := s.readUsers()
	if err != nil {
		return err
	}
	s.acl.mu.Lock()
	defer s.acl.mu.Unlock()
	if found[defaultUser] == nil { // it is what the command line says
		found[defaultUser] = s.acl.normal.rights.Load()
	}
	ended := map[string]bool{}
	for name, u := range s.acl.users {
		was := u.String()
		r := found[name]
		if r == nil {
			u.rights.Store(s.ready(&rights{}))
			delete(s.acl.users, name)
		} else {
			u.rights.Store(r)
		}
		ended[name] = name != defaultUser && (r == nil || was != u.String())
	}
	for name, r := range found {
		if s.acl.users[name] == nil {
			u := &user{name: name}
			u.rights.Store(r)
			s.acl.users[name] = u
		}
	}
	s.expel(ended)
	return nil
}

// saveUsers writes the file anew.
func (s *Server) saveUsers() error {
	s.acl.mu.Lock()
	defer s.acl.mu.Unlock()
	var b bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(s.acl.users)) {
		fmt.Fprintln(&b, s.acl.users[name])
	}
	f, err := os.CreateTemp(filepath.Dir(s.acl.file), "."+filepath.Base(s.acl.file)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.Write(b.Bytes())
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), s.acl.file)
}

// checkUser refuses a name that no user can have.
func checkUser(name string) error {
	switch {
	case name == "" || strings.ContainsAny(name, " \t\r\n\x00"):
		return fault("ERR Usernames can't contain spaces or null characters")
	case len(name) > maxUserBytes:
		return fault(fmt.Sprintf("ERR username of %d bytes, above the limit %d", len(name), maxUserBytes))
	}
	return nil
}

// user finds a user; nil if there is none.
func (s *Server) user(name string) *user {
	s.acl.mu.Lock()
	defer s.acl.mu.Unlock()
	return s.acl.users[name]
}

// expel ends the connections of users.
func (s *Server) expel(names map[string]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		c.mu.Lock()
		name := c.about.user
		c.mu.Unlock()
		if names[name] {
			c.sock.killed.Store(true)
			hangUp(c.sock.nc)
		}
	}
}

// forbid tells of a refusal in ACL LOG.
func (c *conn) forbid(reason, object, name string) {
	now := time.Now()
	l := &c.s.acl
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, e := range l.log {
		if e.reason == reason && e.object == object && e.user == name && now.Sub(e.at) < sameEntry {
			e.count++
			e.at = now
			l.log = slices.Insert(slices.Delete(l.log, i, i+1), 0, e)
			return
		}
	}
	e := &aclEntry{count: 1, reason: reason, object: string(word([]byte(object), 1024)), user: string(word([]byte(name), maxUserBytes)), at: now, client: strings.TrimSuffix(c.line(now, reason), "\n")}
	l.log = slices.Insert(l.log, 0, e)
	l.log = l.log[:min(len(l.log), maxLog)]
}
