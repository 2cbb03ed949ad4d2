package rail

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Facts are what the kernel says of the adapter that has an address of this host: its NUMA node, -1 if it has none, and its rate, 0 if
// that is not known. root is "/" but in tests.
func Facts(root string, address netip.Addr) (numa int32, megabits uint32) {
	numa = -1
	name := interfaceOf(address)
	if name == "" {
		return numa, 0
	}
	at := filepath.Join(root, "sys/class/net", name)
	if v, ok := readNumber(filepath.Join(at, "device/numa_node")); ok && v >= 0 {
		numa = int32(v)
	}
	if v, ok := readNumber(filepath.Join(at, "speed")); ok && v > 0 {
		megabits = uint32(v)
	}
	return numa, megabits
}

// interfaceOf is the name of the interface that has an address; "": none.
func interfaceOf(address netip.Addr) string {
	all, err := net.Interfaces()
	if err != nil {
		return ""
	}
	for _, i := range all {
		have, err := i.Addrs()
		if err != nil {
			continue
		}
		for _, a := range have {
			if n, ok := a.(*net.IPNet); ok {
				if ip, ok := netip.AddrFromSlice(n.IP); ok && ip.Unmap() == address.Unmap() {
					return i.Name
				}
			}
		}
	}
	return ""
}

// readNumber reads a file of sysfs. An interface without a link answers its speed with an error.
func readNumber(path string) (int64, bool) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	v, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 32)
	return v, err == nil
}
