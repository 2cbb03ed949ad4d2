package btree

const (
	// valuesOnce and valuesOnceBytes bound what a scan reads of external values in one round, after it has shown by reading that
	// it goes on.
	valuesOnce      = 128
	valuesOnceBytes = 256 << 10
)

// valuesAhead are external values of a leaf that a scan has read in one round. They are of the versions that the leaf names, as if each
// had been read by itself: an external value never changes.
type valuesAhead struct {
	refs  []Ref
	spans [][2]int // of buf, by refs; empty: read it by itself
	buf   []byte
	next  int // of refs
	most  int // in the next round
}

// valueAhead is the value of an entry that was read in a round with others; nil: read it by itself. The entry is n places behind
// from, or before to, in the direction of the scan.
func (s *scan) valueAhead(leaf *page, e *leafEntry, from, to, n int) []byte {
	v := &s.values
	ref, _ := e.outside()
	if v.next >= len(v.refs) || v.refs[v.next] != ref {
		s.readValues(leaf, from, to, n)
	}
	if v.next >= len(v.refs) {
		return nil
	}
	at := v.spans[v.next]
	v.next++
	if at[0] == at[1] {
		return nil
	}
	return v.buf[at[0]:at[1]]
}

// readValues reads the external values of a leaf from an entry on. What cannot be read is left to be read by itself.
func (s *scan) readValues(leaf *page, from, to, n int) {
	v := &s.values
	v.refs, v.spans, v.buf, v.next = v.refs[:0], v.spans[:0], v.buf[:0], 0
	v.most = min(max(1, 2*v.most), valuesOnce)
	most := v.most
	if s.Limit > 0 {
		most = min(most, s.Limit-s.given)
	}
	var sizes [valuesOnce]int
	for total := 0; n < to-from && len(v.refs) < most; n++ {
		e, _ := leaf.leaf(s.index(from, to, n))
		if e.layer() {
			break
		}
		if !e.external {
			continue
		}
		ref, size := e.outside()
		if total += size; total > valuesOnceBytes {
			break
		}
		sizes[len(v.refs)] = size
		v.refs, v.spans = append(v.refs, ref), append(v.spans, [2]int{})
	}
	if len(v.refs) < 2 {
		v.refs = v.refs[:0]
		return
	}
	// An error of the round is that of the values it did not bring, and comes again where they are read by themselves.
	_ = s.p.store.ReadMany(v.refs, func(i int, b []byte, err error) {
		if err == nil && len(b) == sizes[i] {
			v.spans[i] = [2]int{len(v.buf), len(v.buf) + len(b)}
			v.buf = append(v.buf, b...)
		}
	})
}

// index is the entry of a leaf that is n places behind from, or before to, in the direction of the scan.
func (s *scan) index(from, to, n int) int {
	if s.Reverse {
		return to - 1 - n
	}
	return from + n
}
