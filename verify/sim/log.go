package sim

import (
	"fmt"
	"strings"

	"github.com/quarrystore/quarry/proto"
	"github.com/quarrystore/quarry/rdma"
	fabric "github.com/quarrystore/quarry/rdma/sim"
)

// eventLog keeps the last events of a schedule.
type eventLog struct {
	lines []string // oldest first
	all   bool     // keep every line, not only the last ones
}

// lastEvents is the number of events that a failure shows.
const lastEvents = 60

func (l *eventLog) add(s string) {
	if l.lines = append(l.lines, s); !l.all && len(l.lines) > 4*lastEvents {
		l.lines = append(l.lines[:0], l.lines[len(l.lines)-lastEvents:]...)
	}
}

func (l *eventLog) last() []string {
	if l.all {
		return l.lines
	}
	return l.lines[max(0, len(l.lines)-lastEvents):]
}

func (w *world) logRound(c *client, r *rdma.Round) {
	for i := range r.Len() {
		if ch := r.At(i); len(ch.Verbs) > 0 {
			w.logf("client %d -> node %d: %s", c.id, ch.To.Conn.(*fabric.Conn).Node().ID, w.verbs(ch, false))
		}
	}
}

func (w *world) logAnswers(c *client, r *rdma.Round) {
	for i := range r.Len() {
		if ch := r.At(i); len(ch.Verbs) > 0 {
			w.logf("client %d <- node %d: %s", c.id, ch.To.Conn.(*fabric.Conn).Node().ID, w.verbs(ch, true))
		}
	}
}

func (w *world) verbs(ch *rdma.Chain, answer bool) string {
	var b strings.Builder
	if answer && ch.Err != nil {
		return ch.Err.Error()
	}
	for i := range ch.Verbs {
		if i == 12 {
			fmt.Fprintf(&b, " ... %d more", len(ch.Verbs)-i)
			break
		}
		v := &ch.Verbs[i]
		if v.Fence {
			b.WriteString("|")
		}
		switch v.Op {
		case rdma.CompareSwap:
			fmt.Fprintf(&b, "CAS %s %s>%s", w.where(v.Off), w.word(v.Off, v.Expect), w.word(v.Off, v.New))
			if answer {
				fmt.Fprintf(&b, " was %s", w.word(v.Off, v.Old))
			}
		case rdma.Read, rdma.Write:
			fmt.Fprintf(&b, "%v %s+%d", v.Op, w.where(v.Off), len(v.Buf))
		default:
			fmt.Fprintf(&b, "%v %s+%d", v.Op, w.where(v.Off), v.Bytes)
		}
		b.WriteString("; ")
	}
	return b.String()
}

// where describes an offset: the slab, map or header there.
func (w *world) where(off uint64) string {
	p := w.mem(w.mirror.table.node[0])
	if s, _, ok := w.check.place(p, off); ok {
		b, _ := w.geo.BlockOf(s.Off)
		i, _ := w.geo.SlabIndex(s.Off, s.Class)
		i += int(b) * s.Class.Slabs()
		switch off {
		case s.ROff():
			return fmt.Sprintf("R%d", i)
		case s.VOff():
			return fmt.Sprintf("V%d", i)
		case s.Off:
			return fmt.Sprintf("A%d", i)
		case s.VOff() + 8:
			return fmt.Sprintf("B%d", i)
		}
	}
	return fmt.Sprintf("%#x", off)
}

func (w *world) word(off, x uint64) string {
	p := w.mem(w.mirror.table.node[0])
	if s, _, ok := w.check.place(p, off); ok {
		switch off {
		case s.ROff():
			if x == 0 {
				return "0"
			}
			return fmt.Sprintf("s%d.%d", proto.R(x).Session(), proto.R(x).Sequence())
		case s.VOff():
			return proto.V(x).String()
		}
	}
	return fmt.Sprintf("%#x", x)
}

func tableString(t *table) string {
	s := ""
	for i := range t.n {
		s += fmt.Sprintf("node %d incarnation %d", t.node[i]+1, t.incarnation[i])
		if t.rebuilding[i] {
			s += " rebuilding"
		}
		s += ", "
	}
	return s + fmt.Sprintf("epoch %d rev %d open %v", t.epoch, t.rev, t.open)
}
