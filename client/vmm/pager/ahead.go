package pager

// sequence decides how much is read ahead, from the faults of a mapping alone.
//
//	pages   .. f f+1 [ window ] [ next window ] next
//	                            ^ mark: read, not mapped. Its fault has another window read
//
// A fault on the page behind the last window makes the window twice as large; any other one starts again with one page. From minMark pages on a
// window is read before the program comes to it.
type sequence struct {
	next uint64 // page behind the last window
	size uint64 // pages of a window
	mark uint64 // first page of the window that is read ahead
	set  bool   // mark means something
}

// minMark is the smallest window that is read ahead, in pages.
const minMark = 16

// missed is called for a fault on a missing page. n is how many pages to read from there on, at most most; ahead how many to read behind
// them without a fault.
func (q *sequence) missed(page, most uint64) (n, ahead uint64) {
	if q.size > 0 && page == q.next || q.set && page == q.mark {
		q.size = min(max(4, 2*q.size), most)
	} else {
		q.size = 1
	}
	q.next, q.set = page+q.size, q.size >= minMark
	if q.set {
		q.mark, q.next = q.next, q.next+q.size
		ahead = q.size
	}
	return q.size, ahead
}

// marked is called for a fault on a page that is in memory. n is how many pages to read from next on, without a fault.
func (q *sequence) marked(page, most uint64) (next, n uint64) {
	if !q.set || page != q.mark {
		return 0, 0
	}
	q.size = min(2*q.size, most)
	q.mark, q.next = q.next, q.next+q.size
	return q.mark, q.size
}
