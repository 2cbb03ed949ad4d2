package redis

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	hexcode "encoding/hex"
	"slices"
	"strings"
	"sync/atomic"
)

// user is one of ACL. Its rights change as a whole, for all its connections at once.
type user struct {
	name   string                 // constant
	rights atomic.Pointer[rights] // replaced as a whole; a command reads it once
}

// rights are immutable.
type rights struct {
	on, nopass bool                // a disabled user cannot authenticate; nopass: any password does
	payload    string              // sanitize-payload or skip-sanitize-payload: of RESTORE, which is not served, kept for the file
	passwords  [][sha256.Size]byte // SHA-256 of each
	// commands: all, then the rules in their order, such as -@write and +config|get. The rules are
	// reduced to those that change something.
	all   bool
	rules []string
	bits  []uint64 // by the number of a command
	// keys
	allKeys  bool      // patterns is empty then
	patterns []pattern // of keys, each with its access
	// Channels of SUBSCRIBE, and patterns of PSUBSCRIBE.
	allChannels bool
	channels    []string
	// full: every command on every key and channel. Such a user costs one comparison per command.
	full bool
}

// pattern is a rule on keys: which keys, and for which access.
type pattern struct {
	access access // reads, writes or both
	text   string // a glob
}

func (p pattern) String() string {
	return map[access]string{reads: "%R~", writes: "%W~", both: "~"}[p.access] + p.text
}

const (
	maxRules     = 128
	maxPatterns  = 1024
	maxPasswords = 128
)

const (
	errNoKey        = fault("NOPERM this user has no permissions to access one of the keys used as arguments")
	errRuleUnknown  = fault("Unknown command or category name in ACL")
	errRuleSyntax   = fault("Syntax error")
	errRuleHash     = fault("The password hash must be exactly 64 characters and contain only lowercase hexadecimal characters")
	errRulePassword = fault("The password you are trying to remove from the user does not exist")
	errRuleAllKeys  = fault("Adding a pattern after the * pattern (or the 'allkeys' flag) is not valid and does not have any effect. Try 'resetkeys' to start with an empty list of patterns")
	errRuleAllChan  = fault("Adding a pattern after the * pattern (or the 'allchannels' flag) is not valid and does not have any effect. Try 'resetchannels' to start with an empty list of channels")
	errRuleSelector = fault("Selectors are not supported")
	errRuleFirstArg = fault("Rules for the first argument of a command are not supported")
	errRuleMany     = fault("Too many rules, patterns or passwords")
)

// clone is a copy that can be changed: rights that a connection uses never change.
func (r *rights) clone() *rights {
	n := *r
	n.passwords, n.rules, n.patterns, n.channels = slices.Clone(r.passwords), slices.Clone(r.rules), slices.Clone(r.patterns), slices.Clone(r.channels)
	return &n
}

// apply changes rights by one rule. They may be used when it has returned nil for all of them and
// ready was called.
func (s *Server) apply(r *rights, rule string) error {
	low := strings.ToLower(rule)
	switch low {
	case "on", "off":
		r.on = low == "on"
	case "nopass":
		r.nopass, r.passwords = true, nil
	case "resetpass":
		r.nopass, r.passwords = false, nil
	case "allkeys", "~*":
		r.allKeys, r.patterns = true, nil
	case "resetkeys":
		r.allKeys, r.patterns = false, nil
	case "allchannels", "&*":
		r.allChannels, r.channels = true, nil
	case "resetchannels":
		r.allChannels, r.channels = false, nil
	case "allcommands", "+@all":
		r.all, r.rules = true, nil
	case "nocommands", "-@all":
		r.all, r.rules = false, nil
	case "reset":
		*r = rights{payload: "sanitize-payload"}
	case "sanitize-payload", "skip-sanitize-payload":
		r.payload = low
	case "clearselectors": // there are none
	default:
		return s.applyPrefixed(r, rule)
	}
	return nil
}

// applyPrefixed applies a rule whose first byte says its kind: password, key pattern, channel or command.
func (s *Server) applyPrefixed(r *rights, rule string) error {
	if rule == "" {
		return errRuleSyntax
	}
	switch rest := rule[1:]; rule[0] {
	case '>', '#', '<', '!':
		return r.password(rule[0], rest)
	case '~', '%':
		return r.pattern(rule)
	case '&':
		if r.allChannels {
			return errRuleAllChan
		}
		if strings.ContainsAny(rest, " \x00") {
			return errRuleSyntax
		}
		if len(r.channels) == maxPatterns {
			return errRuleMany
		}
		if !slices.Contains(r.channels, rest) {
			r.channels = append(r.channels, rest)
		}
	case '+', '-':
		return s.allow(r, strings.ToLower(rule))
	case '(':
		return errRuleSelector
	default:
		return errRuleSyntax
	}
	return nil
}

// password adds (> and #) or removes (< and !) a password; # and ! have its SHA-256 in hexadecimal.
func (r *rights) password(op byte, text string) error {
	sum := sha256.Sum256([]byte(text))
	if op == '#' || op == '!' {
		b, err := hexcode.DecodeString(text)
		if err != nil || len(b) != len(sum) || text != strings.ToLower(text) {
			return errRuleHash
		}
		sum = [sha256.Size]byte(b)
	}
	at := slices.Index(r.passwords, sum)
	if op == '<' || op == '!' {
		if at < 0 {
			return errRulePassword
		}
		r.passwords = slices.Delete(r.passwords, at, at+1)
		return nil
	}
	if len(r.passwords) == maxPasswords {
		return errRuleMany
	}
	if at < 0 {
		r.passwords = append(r.passwords, sum)
	}
	r.nopass = false
	return nil
}

// pattern adds a pattern of keys: ~text for reading and writing, %R~text and %W~text for one of them.
func (r *rights) pattern(rule string) error {
	kind, text, found := strings.Cut(rule, "~")
	p := pattern{both, text}
	if kind != "" {
		p.access = 0
		for _, b := range strings.ToUpper(kind[1:]) {
			switch b {
			case 'R':
				p.access |= reads
			case 'W':
				p.access |= writes
			default:
				return errRuleSyntax
			}
		}
	}
	switch {
	case !found, p.access == 0, strings.ContainsAny(text, " \x00"):
		return errRuleSyntax
	case r.allKeys:
		return errRuleAllKeys
	case len(r.patterns) == maxPatterns:
		return errRuleMany
	case p == pattern{both, "*"}:
		r.allKeys, r.patterns = true, nil
		return nil
	}
	for i := range r.patterns {
		if r.patterns[i].text == text {
			r.patterns[i].access |= p.access
			return nil
		}
	}
	r.patterns = append(r.patterns, p)
	return nil
}

// allow adds a rule for commands, and takes out those that have no effect any more.
func (s *Server) allow(r *rights, rule string) error {
	if !s.eval(nil, rule) {
		if name, _, ok := strings.Cut(rule[1:], "|"); ok && s.commands[name] != nil && s.commands[name].subs == nil {
			return errRuleFirstArg
		}
		return errRuleUnknown
	}
	rules := append(r.rules, rule)
	want := s.evaluate(r.all, rules)
	for i := 0; i < len(rules); {
		without := slices.Delete(slices.Clone(rules), i, i+1)
		if slices.Equal(s.evaluate(r.all, without), want) {
			rules, i = without, 0
		} else {
			i++
		}
	}
	if len(rules) > maxRules {
		return errRuleMany
	}
	r.rules = rules
	return nil
}

// evaluate is the set of commands of rules.
func (s *Server) evaluate(all bool, rules []string) []uint64 {
	bits := make([]uint64, (len(s.numbered)+63)/64)
	if all {
		for i := range s.numbered {
			bits[i/64] |= 1 << (i % 64)
		}
	}
	for _, rule := range rules {
		s.eval(bits, rule)
	}
	return bits
}

// eval changes a set of commands by one rule; nil: none is changed. False: the rule names nothing.
func (s *Server) eval(bits []uint64, rule string) bool {
	set := func(cmd *command) {
		if bits == nil {
			return
		}
		if word, bit := cmd.number/64, uint64(1)<<(cmd.number%64); rule[0] == '+' {
			bits[word] |= bit
		} else {
			bits[word] &^= bit
		}
	}
	if category, ok := strings.CutPrefix(rule[1:], "@"); ok {
		if !slices.Contains(categories, category) {
			return false
		}
		for _, cmd := range s.numbered {
			if slices.Contains(cmd.categories, category) {
				set(cmd)
			}
		}
		return true
	}
	cmd := s.named([]byte(rule[1:]))
	if cmd == nil || len(rule) > 64 {
		return false
	}
	set(cmd)
	for _, sub := range cmd.subs {
		set(sub)
	}
	return true
}

// ready makes rights ready for use.
func (s *Server) ready(r *rights) *rights {
	r.bits = s.evaluate(r.all, r.rules)
	r.full = r.all && len(r.rules) == 0 && r.allKeys && r.allChannels
	return r
}

// may says whether the rights allow a command.
func (r *rights) may(cmd *command) bool {
	return cmd.preAuth || r.bits[cmd.number/64]&(1<<(cmd.number%64)) != 0
}

// mayTouch says whether they allow an access to a key.
func (r *rights) mayTouch(key []byte, a access) bool {
	if r.allKeys {
		return true
	}
	for i := range r.patterns {
		if p := &r.patterns[i]; p.access&a == a && match([]byte(p.text), key, false) {
			return true
		}
	}
	return false
}

// knows says whether a password is one of the user's.
func (r *rights) knows(password []byte) bool {
	if !r.on {
		return false
	}
	if r.nopass {
		return true
	}
	sum := sha256.Sum256(password)
	found := 0
	for i := range r.passwords {
		found |= subtle.ConstantTimeCompare(sum[:], r.passwords[i][:])
	}
	return found == 1
}

// flags, commandText, keyText and channelText describe the rights as ACL GETUSER does.
func (r *rights) flags() []string {
	out := []string{"off"}
	if r.on {
		out[0] = "on"
	}
	if r.nopass {
		out = append(out, "nopass")
	}
	if r.payload != "" {
		out = append(out, r.payload)
	}
	return out
}

func (r *rights) commandText() string {
	base := "-@all"
	if r.all {
		base = "+@all"
	}
	return strings.Join(append([]string{base}, r.rules...), " ")
}

func (r *rights) keyText() string {
	if r.allKeys {
		return "~*"
	}
	var out []string
	for _, p := range r.patterns {
		out = append(out, p.String())
	}
	return strings.Join(out, " ")
}

func (r *rights) channelText() string {
	if r.allChannels {
		return "&*"
	}
	var out []string
	for _, c := range r.channels {
		out = append(out, "&"+c)
	}
	return strings.Join(out, " ")
}

// String is the rules as ACL LIST and the file have them.
func (u *user) String() string {
	r := u.rights.Load()
	out := append([]string{"user", u.name}, r.flags()...)
	for _, p := range r.passwords {
		out = append(out, "#"+hexcode.EncodeToString(p[:]))
	}
	if keys := r.keyText(); keys != "" {
		out = append(out, keys)
	}
	channels := r.channelText()
	if !r.allChannels {
		channels = strings.TrimSpace("resetchannels " + channels)
	}
	return strings.Join(append(out, channels, r.commandText()), " ")
}

// denied is why a call is refused.
type denied struct {
	reason string // as ACL LOG has it: command, key or channel
	object string // the command's name, the key or channel
}

// refuse is nil where the rights allow a call.
func (r *rights) refuse(cmd *command, args [][]byte) *denied {
	if !r.may(cmd) {
		return &denied{"command", cmd.name}
	}
	if cmd.hears {
		for _, name := range args[1:] {
			if !r.mayHear(string(name), cmd.name == "psubscribe") {
				return &denied{"channel", string(name)}
			}
		}
	}
	var bad []byte
	found := false
	cmd.touched(args, func(key []byte, a access) bool {
		if !r.mayTouch(key, a) {
			bad, found = bytes.Clone(key), true
		}
		return !found
	})
	if found {
		return &denied{"key", string(bad)}
	}
	return nil
}

// fault is the error that the client receives.
func (d *denied) fault() error {
	if d.reason == "command" {
		return fault("NOPERM this user has no permissions to run the '" + d.object + "' command")
	}
	if d.reason == "channel" {
		return errNoChannel
	}
	return errNoKey
}
