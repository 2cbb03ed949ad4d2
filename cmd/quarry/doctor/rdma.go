package doctor

import (
	"errors"
	"path/filepath"
	"strings"

	"github.com/quarrystore/quarry/rdma/host/ddio"
	"github.com/quarrystore/quarry/rdma/verbs"
)

// rdma looks at the adapters as the kernel shows them, and asks them, where this
// program is built for it, what they can do.
func (h Host) rdma(p Plan) (out []Finding) {
	const check = "rdma"
	names := h.adapters()
	if len(names) == 0 {
		level, remedy := Info, "without an adapter shm and tcp are used; with one: load its driver and ib_uverbs (rdma-core does both)"
		if p.RDMA {
			level = Error
		}
		return []Finding{found(check, level, remedy, "no adapter")}
	}
	for _, name := range names {
		out = append(out, h.adapter(name)...)
	}
	if h.Root != "/" {
		return out
	}
	caps, err := verbs.Devices()
	switch {
	case errors.Is(err, verbs.ErrNotBuilt):
		level := Warning
		if p.RDMA {
			level = Error
		}
		out = append(out, found(check, level, "use the build with verbs: CGO_ENABLED=1 go build -tags verbs, or the image of the target verbs", "this program is built without RDMA: it can neither ask the adapters nor use them"))
	case err != nil:
		out = append(out, found(check, Error, "see docs/RDMA.md", "%v", err))
	}
	seen := ""
	for _, c := range caps {
		if c.Device == seen {
			continue // another address of it
		}
		seen = c.Device
		yes := func(b bool, s string) string {
			if b {
				return s
			}
			return "no " + s
		}
		if c.Acts(verbs.AtomicsAuto) {
			out = append(out, found(check, Info, "nothing: READs and WRITEs stay one-sided, and --rdma-atomics required refuses such an adapter; see docs/RDMA.md", "%s has no atomics: the storage node's processors execute chains that have one", c.Device))
		}
		out = append(out, ok(check, "%s: atomics %s, %d reads and atomics in flight, %s, %s, %s", c.Device, c.Atomics, c.MaxReads,
			yes(c.Windows2B, "windows of type 2"), yes(c.Flush, "native FLUSH"), yes(c.AtomicWrite, "ATOMIC_WRITE")))
	}
	return out
}

// adapter looks at one device's ports and addresses, and whether it can be opened.
func (h Host) adapter(name string) (out []Finding) {
	const check = "rdma"
	dir := "sys/class/infiniband/" + name
	var uverbs string
	for _, d := range h.list("sys/class/infiniband_verbs/uverbs*") {
		if rel, err := filepath.Rel(h.Root, d); err == nil && h.text(filepath.Join(rel, "ibdev")) == name {
			uverbs = filepath.Base(d)
		}
	}
	switch {
	case uverbs == "":
		out = append(out, found(check, Error, "modprobe ib_uverbs", "%s has no device for programs", name))
	case len(h.list("dev/infiniband/rdma_cm")) == 0:
		out = append(out, found(check, Error, "modprobe rdma_ucm; pass /dev/infiniband/rdma_cm to the container", "%s: /dev/infiniband/rdma_cm is not there", name))
	case len(h.list("dev/infiniband/"+uverbs)) == 0:
		out = append(out, found(check, Error, "pass /dev/infiniband/"+uverbs+" to the container: a device plugin does it on Kubernetes", "%s: /dev/infiniband/%s is not there", name, uverbs))
	}
	out = append(out, h.ddio(name))
	active := 0
	for _, port := range h.list(dir + "/ports/*") {
		n := filepath.Base(port)
		at := dir + "/ports/" + n
		link := h.text(at + "/link_layer")
		_, state, _ := strings.Cut(h.text(at+"/state"), ": ")
		if state != "ACTIVE" {
			out = append(out, found(check, Warning, "check the cable, the switch and, for InfiniBand, the subnet manager", "%s port %s is %s", name, n, strings.ToLower(state)))
			continue
		}
		active++
		gids := h.gids(at)
		if link == "Ethernet" && gids["RoCE v2"] == 0 {
			out = append(out, found(check, Error, "give the interface an IPv4 or global IPv6 address", "%s port %s has no RoCE v2 address", name, n))
			continue
		}
		out = append(out, ok(check, "%s port %s is active: %s, %s, RoCE v2 addresses: %d", name, n, link, h.text(at+"/rate"), gids["RoCE v2"]))
	}
	if active == 0 {
		out = append(out, found(check, Error, "see the ports above", "%s has no active port", name))
	}
	return out
}

// ddio says where WRITEs of an adapter go first, which decides how they are made durable.
func (h Host) ddio(name string) Finding {
	const check = "ddio"
	port, err := ddio.Find(h.Root, name)
	if err != nil {
		return found(check, Info, "", "%v: it counts as on, and durable changes of RDMA clients are flushed by the node's processors or by the adapter", err)
	}
	now, err := port.Read()
	if err != nil {
		return found(check, Info, "run this as root", "%v", err)
	}
	return ok(check, "%s is behind root port %s, whose DDIO is %s", name, port.Address, now)
}

// gids counts the addresses of a port by kind.
func (h Host) gids(at string) map[string]int {
	kinds := map[string]int{}
	for _, g := range h.list(at + "/gids/*") {
		if strings.Trim(h.text(at+"/gids/"+filepath.Base(g)), "0:") == "" {
			continue // an empty place of the table
		}
		kinds[h.text(at+"/gid_attrs/types/"+filepath.Base(g))]++
	}
	return kinds
}
