package rxevm

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Lines of a real modules.dep; depmod lists dependencies last-needed first.
const someModulesDep = `kernel/fs/9p/9p.ko.xz: kernel/net/9p/9pnet.ko.xz kernel/fs/netfs/netfs.ko.xz
kernel/net/9p/9pnet.ko.xz: kernel/fs/netfs/netfs.ko.xz
kernel/net/9p/9pnet_virtio.ko.xz: kernel/net/9p/9pnet.ko.xz kernel/fs/netfs/netfs.ko.xz
kernel/fs/netfs/netfs.ko.xz:
kernel/drivers/char/hw_random/virtio-rng.ko.xz:
kernel/fs/overlayfs/overlay.ko.xz:
kernel/drivers/net/virtio_net.ko.xz: kernel/drivers/net/net_failover.ko.xz kernel/net/core/failover.ko.xz
kernel/drivers/net/net_failover.ko.xz: kernel/net/core/failover.ko.xz
kernel/net/core/failover.ko.xz:
kernel/drivers/net/veth.ko.xz:
kernel/crypto/crc32_generic.ko.xz:
kernel/arch/x86/crypto/crc32-pclmul.ko.xz:
kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.xz: kernel/drivers/infiniband/core/ib_uverbs.ko.xz kernel/drivers/infiniband/core/ib_core.ko.xz kernel/net/ipv6/ip6_udp_tunnel.ko.xz kernel/net/ipv4/udp_tunnel.ko.xz
kernel/drivers/infiniband/core/ib_uverbs.ko.xz: kernel/drivers/infiniband/core/ib_core.ko.xz
kernel/drivers/infiniband/core/ib_core.ko.xz:
kernel/drivers/infiniband/core/ib_cm.ko.xz: kernel/drivers/infiniband/core/ib_core.ko.xz
kernel/drivers/infiniband/core/iw_cm.ko.xz: kernel/drivers/infiniband/core/ib_core.ko.xz
kernel/drivers/infiniband/core/rdma_cm.ko.xz: kernel/drivers/infiniband/core/iw_cm.ko.xz kernel/drivers/infiniband/core/ib_cm.ko.xz kernel/drivers/infiniband/core/ib_core.ko.xz kernel/fs/configfs/configfs.ko.xz
kernel/drivers/infiniband/core/rdma_ucm.ko.xz: kernel/drivers/infiniband/core/ib_uverbs.ko.xz kernel/drivers/infiniband/core/rdma_cm.ko.xz kernel/drivers/infiniband/core/iw_cm.ko.xz kernel/drivers/infiniband/core/ib_cm.ko.xz kernel/drivers/infiniband/core/ib_core.ko.xz kernel/fs/configfs/configfs.ko.xz
kernel/fs/configfs/configfs.ko.xz:
kernel/net/ipv6/ip6_udp_tunnel.ko.xz:
kernel/net/ipv4/udp_tunnel.ko.xz:
`

const someModulesBuiltin = `kernel/drivers/virtio/virtio_pci.ko
kernel/drivers/char/virtio_console.ko
`

func parsedModules(t *testing.T, dep, builtin string) (modulesDep, map[string]bool) {
	t.Helper()
	d, err := parseModulesDep(strings.NewReader(dep))
	require.NoError(t, err)
	b, err := parseModulesBuiltin(strings.NewReader(builtin))
	require.NoError(t, err)
	return d, b
}

func TestModulesComeAfterWhatTheyNeed(t *testing.T) {
	dep, builtin := parsedModules(t, someModulesDep, someModulesBuiltin)
	order, err := loadOrder(guestModules, dep, builtin)
	require.NoError(t, err)

	at := map[string]int{}
	for i, f := range order {
		_, twice := at[moduleName(f)]
		require.False(t, twice, "%s is loaded twice", f)
		at[moduleName(f)] = i
	}
	for name, i := range at {
		for _, n := range dep.needs[name] {
			require.Contains(t, at, n)
			require.Less(t, at[n], i, "%s needs %s", name, n)
		}
	}
	for _, m := range guestModules {
		if _, ok := dep.file[m.name]; ok {
			require.Contains(t, at, m.name)
		}
	}
}

// No dependency file shows that rxe needs crc32.
func TestCRC32ComesBeforeRxe(t *testing.T) {
	dep, builtin := parsedModules(t, someModulesDep, someModulesBuiltin)
	order, err := loadOrder(guestModules, dep, builtin)
	require.NoError(t, err)
	find := func(name string) int {
		return slices.IndexFunc(order, func(f string) bool { return moduleName(f) == name })
	}
	require.NotEqual(t, -1, find("crc32_generic"))
	require.NotEqual(t, -1, find("crc32_pclmul"), "a dash in the file name is an underscore")
	require.Less(t, find("crc32_generic"), find("rdma_rxe"))
	require.Less(t, find("crc32_pclmul"), find("rdma_rxe"))
}

func TestModuleOrderRefuses(t *testing.T) {
	without := func(name string) string {
		var kept []string
		for l := range strings.Lines(someModulesDep) {
			if !strings.Contains(strings.SplitN(l, ":", 2)[0], "/"+name+".ko") {
				kept = append(kept, l)
			}
		}
		return strings.Join(kept, "")
	}
	for name, c := range map[string]struct{ dep, says string }{
		"no rxe":              {without("rdma_rxe"), "no module rdma_rxe, needed by the guest"},
		"a dependency absent": {without("ib_core"), "no module ib_core, needed by"},
		"a circle":            {someModulesDep + "k/ib_core.ko: k/ib_uverbs.ko\n", "needs itself"},
	} {
		t.Run(name, func(t *testing.T) {
			dep, builtin := parsedModules(t, c.dep, someModulesBuiltin)
			_, err := loadOrder(guestModules, dep, builtin)
			require.ErrorContains(t, err, c.says)
		})
	}

	_, err := parseModulesDep(strings.NewReader("garbage\n"))
	require.ErrorContains(t, err, "no colon")
}

func TestOptionalModulesMayBeAbsent(t *testing.T) {
	dep, builtin := parsedModules(t, "k/a.ko:\n", "k/b.ko\n")
	order, err := loadOrder([]module{{name: "x", optional: true}, {name: "a"}, {name: "b"}}, dep, builtin)
	require.NoError(t, err)
	require.Equal(t, []string{"k/a.ko"}, order)
}
