package rail

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestChooseFigure4A has the example of the source 000: clients A to J, each with an adapter at each of the fabric devices A, B and C;
// servers A to F, each at the three fabric devices; regions PA.1 to PF.6, of which 1 to 3 lie at socket 0 of their server and 4 to 6 at
// socket 1. The source does not say at which socket each adapter of a server is but for server C, of which FIG. 4C shows that of fabric
// device A at socket A. Here fabric device A comes in at socket 0 of each server, C at socket 1, and B at 0 of the servers A, C and E
// and at 1 of the others.
func TestChooseFigure4A(t *testing.T) {
	want := map[string][]string{ // by server and socket: the adapters that lanes take in turns
		"A0": {"A", "B"}, "A1": {"C"}, "B0": {"A"}, "B1": {"B", "C"},
		"C0": {"A", "B"}, "C1": {"C"}, "D0": {"A"}, "D1": {"B", "C"},
		"E0": {"A", "B"}, "E1": {"C"}, "F0": {"A"}, "F1": {"B", "C"},
	}
	checked := 0
	for number, client := range "ABCDEFGHJ" {
		adapter := func(fabric byte) netip.Addr { return netip.AddrFrom4([4]byte{10, fabric - 'A', 0, byte(number + 1)}) }
		own := []Own{{"A", adapter('A')}, {"B", adapter('B')}, {"C", adapter('C')}}
		for number, server := range "ABCDEF" {
			ends := []End{{Address: "A", Rail: "A", NUMA: 0}, {Address: "B", Rail: "B", NUMA: int32(number % 2)}, {Address: "C", Rail: "C", NUMA: 1}}
			for region := 1; region <= 6; region++ {
				socket := int32((region - 1) / 3)
				expected := want[fmt.Sprintf("%c%d", server, socket)]
				for lane := range uint32(6) {
					name := fmt.Sprintf("client %c, P%c.%d, lane %d", client, server, region, lane)
					paths, err := Choose(Question{Own: own, Ends: ends, Memory: socket, Strict: true, Turn: lane})
					if err != nil || len(paths) != 3 {
						t.Fatalf("%s: %v, %v", name, paths, err)
					}
					fabric := expected[int(lane)%len(expected)]
					if paths[0].End.Rail != fabric || paths[0].From != adapter(fabric[0]) || paths[0].Crosses {
						t.Errorf("%s: %+v, want fabric device %s", name, paths[0], fabric)
					}
					checked++
				}
			}
		}
	}
	if checked != 9*36*6 {
		t.Errorf("%d choices, want those of 9 clients, 36 regions and 6 lanes", checked)
	}
}

// TestChooseFigure4B is the write of client A to PC.5: server C is connected to fabric device A alone, at the other socket, so that
// the request goes out by RNIC A, and passes from socket A to socket B.
func TestChooseFigure4B(t *testing.T) {
	own := []Own{{Name: "A"}, {Name: "B"}, {Name: "C"}}
	paths, err := Choose(Question{Own: own, Ends: []End{{Address: "server C", Rail: "A", NUMA: 0}}, Memory: 1, Strict: true})
	if err != nil || len(paths) != 1 || paths[0].End.Rail != "A" || paths[0].Crosses {
		t.Errorf("%v, %v; want RNIC A", paths, err)
	}
}

func TestChoose(t *testing.T) {
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.1.1")
	end := func(text string) End { // RAIL/NUMA/MEGABITS
		e := End{Address: text, NUMA: -1}
		p := strings.Split(text, "/")
		e.Rail = p[0]
		if len(p) > 1 {
			fmt.Sscan(p[1], &e.NUMA)
			fmt.Sscan(p[2], &e.Megabits)
		}
		return e
	}
	for _, c := range []struct {
		name   string
		own    []Own
		ends   []string
		down   []string
		strict bool
		turn   uint32
		want   string // addresses, with where they are reached from, and ! behind crossings
	}{
		{"one unnamed end", nil, []string{""}, nil, true, 3, ""},
		{"no own rails: order of the row", nil, []string{"a/1/10", "b/0/100"}, nil, true, 1, "a/1/10 b/0/100"},
		{"no own rails: down last", nil, []string{"a", "b"}, []string{"a"}, false, 0, "b a"},
		{"same rail", []Own{{"b", b}}, []string{"a", "b"}, nil, true, 0, "b@10.0.1.1"},
		{"same rail, others behind", []Own{{"b", b}}, []string{"a", "b"}, nil, false, 0, "b@10.0.1.1 a!"},
		{"crossing, warned of", []Own{{"c", b}}, []string{"a", "b"}, nil, false, 1, "b! a!"},
		{"crossing, refused", []Own{{"c", b}}, []string{"a", "b"}, nil, true, 0, "refused"},
		{"an unnamed end is no crossing", []Own{{"c", b}}, []string{"a", ""}, nil, true, 0, ""},
		{"unnamed before crossing", []Own{{"c", b}}, []string{"a", ""}, nil, false, 0, " a!"},
		{"in turns", []Own{{"a", a}, {"b", b}}, []string{"a", "b"}, nil, true, 1, "b@10.0.1.1 a@10.0.0.1"},
		{"in turns, over two adapters at a rail", []Own{{"a", a}, {"a", b}}, []string{"a"}, nil, true, 1, "a@10.0.1.1 a@10.0.0.1"},
		{"near", []Own{{"a", a}, {"b", b}}, []string{"a/1/100", "b/0/10"}, nil, true, 0, "b/0/10@10.0.1.1 a/1/100@10.0.0.1"},
		{"unknown is as good as near", []Own{{"a", a}, {"b", b}}, []string{"a/-1/100", "b/0/10"}, nil, true, 0, "a/-1/100@10.0.0.1 b/0/10@10.0.1.1"},
		{"fast", []Own{{"a", a}, {"b", b}}, []string{"a/0/10", "b/0/100"}, nil, true, 1, "b/0/100@10.0.1.1 a/0/10@10.0.0.1"},
		{"own rail before a fast and near one", []Own{{"a", a}}, []string{"b/0/100", "a/1/10"}, nil, false, 0, "a/1/10@10.0.0.1 b/0/100!"},
		{"down: the other own one", []Own{{"a", a}, {"b", b}}, []string{"a", "b"}, []string{"b"}, true, 1, "a@10.0.0.1 b@10.0.1.1"},
		{"down: a crossing", []Own{{"a", a}}, []string{"a", "b"}, []string{"a"}, false, 0, "b! a@10.0.0.1"},
		{"down: strict stays", []Own{{"a", a}}, []string{"a", "b"}, []string{"a"}, true, 0, "a@10.0.0.1"},
		{"all down", []Own{{"a", a}}, []string{"b", "a"}, []string{"a", "b"}, false, 0, "a@10.0.0.1 b!"},
	} {
		q := Question{Own: c.own, Memory: 0, Strict: c.strict, Turn: c.turn, Down: func(p Path) bool { return slices.Contains(c.down, p.End.Address) }}
		for _, e := range c.ends {
			q.Ends = append(q.Ends, end(e))
		}
		paths, err := Choose(q)
		var got []string
		for _, p := range paths {
			s := p.End.Address
			if p.From.IsValid() {
				s += "@" + p.From.String()
			}
			if p.Crosses {
				s += "!"
			}
			got = append(got, s)
		}
		if errors.Is(err, ErrCrossing) {
			got = []string{"refused"}
		} else if err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if s := strings.Join(got, " "); s != c.want {
			t.Errorf("%s: %q, want %q", c.name, s, c.want)
		}
	}
}

func TestChooseWithoutEnds(t *testing.T) {
	if paths, err := Choose(Question{}); err == nil || errors.Is(err, ErrCrossing) {
		t.Errorf("%v, %v: want an error that is no crossing", paths, err)
	}
}

func TestParse(t *testing.T) {
	long := strings.Repeat("x", MaxNameBytes+1)
	for _, bad := range [][]string{{""}, {"a b"}, {long}, {"a=host"}, {"a="}, {"a=0.0.0.0"}, {"a", "a"}, strings.Split(strings.Repeat("x,", MaxOwn+1), ",")} {
		if own, err := ParseOwn(bad); err == nil {
			t.Errorf("ParseOwn(%q): %v", bad, own)
		}
	}
	own, err := ParseOwn([]string{"a", "b=10.0.0.1", "b=fd00::1"})
	if err != nil || len(own) != 3 || own[0].From.IsValid() || own[2].From.String() != "fd00::1" {
		t.Errorf("ParseOwn: %v, %v", own, err)
	}
	for _, bad := range []string{"", "a=", "a", "a=host", "=h:1", "a b=h:1", "h:1,", long + "=h:1", strings.Repeat("h:1,", MaxEnds) + "h:1"} {
		if all, err := ParseListen(bad); err == nil {
			t.Errorf("ParseListen(%q): %v", bad, all)
		}
	}
	all, err := ParseListen("a=10.0.0.1:7421,[fd00::1]:7421")
	if err != nil || !slices.Equal(all, []Listen{{"a", "10.0.0.1:7421"}, {"", "[fd00::1]:7421"}}) {
		t.Errorf("ParseListen: %v, %v", all, err)
	}
	for text, want := range map[string]bool{"": false, "warn": false, "strict": true} {
		if strict, err := ParsePolicy(text); err != nil || strict != want {
			t.Errorf("ParsePolicy(%q): %v, %v", text, strict, err)
		}
	}
	if _, err := ParsePolicy("a"); err == nil {
		t.Error("ParsePolicy takes the name of a rail")
	}
}

// TestTryLeavesTime: a network that swallows everything gets a share of the time, so that the next one is tried.
func TestTryLeavesTime(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	end, _ := ctx.Deadline()
	paths := []Path{{End: End{Address: "dead"}}, {End: End{Address: "alive"}}}
	var tried []string
	err := Try(ctx, paths, func(error) bool { return false }, func(ctx context.Context, p Path) error {
		tried = append(tried, p.End.Address)
		until, _ := ctx.Deadline()
		if p.End.Address == "dead" {
			if left := end.Sub(until); left < 20*time.Minute || left > 40*time.Minute {
				t.Errorf("of an hour %v are left for the second of two", left)
			}
			return context.DeadlineExceeded
		}
		return nil
	})
	if err != nil || !slices.Equal(tried, []string{"dead", "alive"}) {
		t.Errorf("tried %q: %v", tried, err)
	}
	refused := errors.New("refused")
	tried = nil
	err = Try(ctx, paths, func(err error) bool { return errors.Is(err, refused) }, func(context.Context, Path) error { tried = append(tried, ""); return refused })
	if err != refused || len(tried) != 1 {
		t.Errorf("%d tried: %v; want the node's answer at once", len(tried), err)
	}
}

func TestDowns(t *testing.T) {
	var d Downs
	p, q := Path{End: End{Address: "a"}}, Path{End: End{Address: "a"}, From: netip.MustParseAddr("10.0.0.1")}
	if d.Has(p) || !d.Failed(p) || d.Failed(p) || !d.Has(p) || d.Has(q) {
		t.Error("a failure is not news once, or is of another path too")
	}
	for range 20 {
		d.all[way{p.From, "a"}].until = 0 // the hold is over
		if d.Has(p) || !d.Failed(p) {
			t.Fatal("still down behind the hold")
		}
	}
	if hold := d.all[way{p.From, "a"}].hold; hold != lastHold {
		t.Errorf("the hold is %v after many failures, want %v", hold, lastHold)
	}
	d.Answered(p)
	if d.Has(p) {
		t.Error("down although it has answered")
	}
	for i := range maxDowns + 1 {
		d.Failed(Path{End: End{Address: fmt.Sprint(i)}})
	}
	if len(d.all) > maxDowns {
		t.Errorf("%d remembered", len(d.all))
	}
}

func TestFacts(t *testing.T) {
	root := t.TempDir()
	at := filepath.Join(root, "sys/class/net/lo")
	if err := os.MkdirAll(filepath.Join(at, "device"), 0o700); err != nil {
		t.Fatal(err)
	}
	local := netip.MustParseAddr("127.0.0.1")
	if numa, rate := Facts(root, local); numa != -1 || rate != 0 {
		t.Errorf("without files: NUMA node %d, %d Mbit/s", numa, rate)
	}
	for name, text := range map[string]string{"speed": "25000\n", "device/numa_node": "1\n"} {
		if err := os.WriteFile(filepath.Join(at, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if numa, rate := Facts(root, local); numa != 1 || rate != 25000 {
		t.Errorf("NUMA node %d, %d Mbit/s; want 1 and 25000", numa, rate)
	}
	if numa, rate := Facts(root, netip.MustParseAddr("192.0.2.1")); numa != -1 || rate != 0 {
		t.Errorf("an address of another host: NUMA node %d, %d Mbit/s", numa, rate)
	}
}
