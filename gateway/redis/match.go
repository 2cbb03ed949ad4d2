package redis

// match says whether a string matches a pattern with * ? [] and \, just as Redis
// reads them.
func match(pattern, s []byte, fold bool) bool {
	hopeless := false
	return matchFrom(pattern, s, fold, &hopeless)
}

// matchFrom sets hopeless when no longer stretch for an earlier * can help: that
// keeps patterns of many * from taking exponential time.
func matchFrom(p, s []byte, fold bool, hopeless *bool) bool {
	for len(p) > 0 && len(s) > 0 {
		switch p[0] {
		case '*':
			for len(p) > 1 && p[1] == '*' {
				p = p[1:]
			}
			if len(p) == 1 {
				return true
			}
			for ; len(s) > 0; s = s[1:] {
				if matchFrom(p[1:], s, fold, hopeless) {
					return true
				}
				if *hopeless {
					return false
				}
			}
			*hopeless = true
			return false
		case '?':
			p, s = p[1:], s[1:]
		case '[':
			rest, ok := matchSet(p[1:], s[0], fold)
			if !ok {
				return false
			}
			p, s = rest, s[1:]
		default:
			if p[0] == '\\' && len(p) >= 2 {
				p = p[1:]
			}
			if lower(p[0], fold) != lower(s[0], fold) {
				return false
			}
			p, s = p[1:], s[1:]
		}
		if len(s) == 0 {
			for len(p) > 0 && p[0] == '*' {
				p = p[1:]
			}
			break
		}
	}
	return len(p) == 0 && len(s) == 0
}

// matchSet matches a byte with a set whose [ is past; rest is the pattern after it.
func matchSet(p []byte, b byte, fold bool) (rest []byte, ok bool) {
	not := len(p) > 0 && p[0] == '^'
	if not {
		p = p[1:]
	}
	for {
		switch {
		case len(p) >= 2 && p[0] == '\\':
			ok = ok || p[1] == b
			p = p[2:]
		case len(p) == 0:
			return p, ok != not
		case p[0] == ']':
			return p[1:], ok != not
		case len(p) >= 3 && p[1] == '-':
			from, to := p[0], p[2]
			if from > to {
				from, to = to, from
			}
			from, to, c := lower(from, fold), lower(to, fold), lower(b, fold)
			ok = ok || c >= from && c <= to
			p = p[3:]
		default:
			ok = ok || lower(p[0], fold) == lower(b, fold)
			p = p[1:]
		}
	}
}

// lower is b in lower case if fold is set.
func lower(b byte, fold bool) byte {
	if fold && b >= 'A' && b <= 'Z' {
		return b + 'a' - 'A'
	}
	return b
}

// literal is what every match of a pattern starts with.
func literal(p []byte) []byte {
	for i, b := range p {
		if b == '*' || b == '?' || b == '[' || b == '\\' {
			return p[:i]
		}
	}
	return p
}
