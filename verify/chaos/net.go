package chaos

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"

	"github.com/quarrystore/quarry/internal/local"
)

// network is where the processes of a run live: a namespace for each, joined by
// a veth link to a hub that routes between them. A nil network is the loopback.
//
// One-way drops are rules of the hub's routing: packets that came in by a link,
// or are to go out by one, meet a blackhole. That needs the ip tool alone, not a
// packet filter.
type network struct {
	prefix string         // of the namespaces, unique on the host
	places map[string]int // member -> its number, from 1
}

// namespacePrefix is followed by the number of the process that made it.
const namespacePrefix = "qchaos"

// newNetwork makes the hub. The error says why there can be none.
func newNetwork() (*network, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("network namespaces need root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		return nil, errors.New("the ip tool is missing (package iproute2)")
	}
	removeStale()
	n := &network{prefix: namespacePrefix + strconv.Itoa(os.Getpid()) + "-", places: map[string]int{}}
	for _, args := range [][]string{
		{"netns", "add", n.ns("hub")},
		{"-n", n.ns("hub"), "link", "set", "lo", "up"},
		{"netns", "exec", n.ns("hub"), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"},
	} {
		if err := ip(args...); err != nil {
			n.close()
			return nil, err
		}
	}
	return n, nil
}

// ip runs the ip tool.
func ip(args ...string) error {
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %s", strings.Join(args, " "), strings.TrimSpace(string(out)))
	}
	return nil
}

// removeStale removes the namespaces of runs that were killed.
func removeStale() {
	out, err := exec.Command("ip", "netns", "list").Output()
	if err != nil {
		return
	}
	for _, line := range strings.Split(string(out), "\n") {
		name, _, _ := strings.Cut(strings.TrimSpace(line), " ")
		rest, ok := strings.CutPrefix(name, namespacePrefix)
		pid, err := strconv.Atoi(strings.SplitN(rest, "-", 2)[0])
		if ok && err == nil && syscall.Kill(pid, 0) == syscall.ESRCH {
			_ = ip("netns", "del", name)
		}
	}
}

func (n *network) ns(member string) string   { return n.prefix + member }
func (n *network) link(member string) string { return "v-" + member }

// host makes a place for a member, once, and says where it is.
func (n *network) host(member string) (local.Host, error) {
	if n == nil {
		return local.Host{Address: "127.0.0.1"}, nil
	}
	at, ok := n.places[member]
	if !ok {
		at = len(n.places) + 1
		n.places[member] = at
		if err := n.wire(member, at); err != nil {
			return local.Host{}, err
		}
	}
	return local.Host{Address: address(at, 2), Run: []string{"ip", "netns", "exec", n.ns(member)}}, nil
}

// address of one side of a link: 1 is the hub's, 2 the member's.
func address(at, side int) string { return fmt.Sprintf("10.77.%d.%d", at, side) }

func (n *network) wire(member string, at int) error {
	ns, hub, link := n.ns(member), n.ns("hub"), n.link(member)
	for _, args := range [][]string{
		{"netns", "add", ns},
		{"-n", hub, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", ns},
		{"-n", hub, "addr", "add", address(at, 1) + "/30", "dev", link},
		{"-n", hub, "link", "set", link, "up"},
		{"-n", ns, "addr", "add", address(at, 2) + "/30", "dev", "eth0"},
		{"-n", ns, "link", "set", "eth0", "up"},
		{"-n", ns, "link", "set", "lo", "up"},
		{"-n", ns, "route", "add", "default", "via", address(at, 1)},
	} {
		if err := ip(args...); err != nil {
			return err
		}
	}
	return nil
}

// cut takes a member's link down; join brings it up again.
func (n *network) cut(member string) error {
	return ip("-n", n.ns("hub"), "link", "set", n.link(member), "down")
}

func (n *network) join(member string) error {
	return ip("-n", n.ns("hub"), "link", "set", n.link(member), "up")
}

// mute drops what a member sends; it still receives.
func (n *network) mute(member string) error { return n.rule("add", "iif", n.link(member)) }

func (n *network) unmute(member string) error { return n.rule("del", "iif", n.link(member)) }

// deafen drops what is sent to a member; what it sends still arrives.
func (n *network) deafen(member string) error {
	return n.rule("add", "to", address(n.places[member], 2))
}

func (n *network) undeafen(member string) error {
	return n.rule("del", "to", address(n.places[member], 2))
}

// part drops what two members send to each other; all others reach both.
func (n *network) part(a, b string) error {
	return errors.Join(
		n.rule("add", "from", address(n.places[a], 2), "to", address(n.places[b], 2)),
		n.rule("add", "from", address(n.places[b], 2), "to", address(n.places[a], 2)))
}

// rule adds or deletes a rule of the hub that swallows packets.
func (n *network) rule(verb string, what ...string) error {
	return ip(append(append([]string{"-n", n.ns("hub"), "rule", verb}, what...), "pref", "100", "blackhole")...)
}

// close removes all namespaces, and with them the links.
func (n *network) close() {
	if n == nil {
		return
	}
	for member := range n.places {
		_ = ip("netns", "del", n.ns(member))
	}
	_ = ip("netns", "del", n.ns("hub"))
}
