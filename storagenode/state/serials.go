package state

import "slices"

// Serials says which sessions have ended for ever.
//
//	         Next
//	----------|------------>  serials
//	only Live | all but Ended
//
// Invariant: a serial refused once is refused for ever.
type Serials struct {
	Next  uint64
	Live  []uint64 // Invariant: sorted, below Next
	Ended []uint64 // Invariant: sorted; refused by Next and Live otherwise are left out
}

// Refuses says whether the session has ended.
func (s *Serials) Refuses(serial uint64) bool {
	if _, ended := slices.BinarySearch(s.Ended, serial); ended || serial == 0 {
		return true
	}
	if serial >= s.Next {
		return false
	}
	_, live := slices.BinarySearch(s.Live, serial)
	return !live
}

// endBelow learns which serials below next live. What is known to have ended stays so.
func (s *Serials) endBelow(next uint64, live []uint64) {
	if next < s.Next {
		return // older than what is known
	}
	var keep []uint64
	for _, serial := range live {
		if serial < next && !s.Refuses(serial) {
			keep = append(keep, serial)
		}
	}
	slices.Sort(keep)
	s.Live, s.Next = slices.Compact(keep), next
	s.Ended = slices.DeleteFunc(s.Ended, func(serial uint64) bool { return serial < next })
}

// end learns of sessions that have ended.
func (s *Serials) end(serials []uint64) {
	for _, serial := range serials {
		if s.Refuses(serial) {
			continue
		}
		if at, live := slices.BinarySearch(s.Live, serial); live {
			s.Live = slices.Delete(s.Live, at, at+1)
			continue
		}
		at, _ := slices.BinarySearch(s.Ended, serial)
		s.Ended = slices.Insert(s.Ended, at, serial)
	}
}
