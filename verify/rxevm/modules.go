package rxevm

import (
	"bufio"
	"fmt"
	"io"
	"path"
	"strings"
)

// module is a kernel module that the guest loads. An optional one is left out if the kernel
// has it neither as a file nor built in.
type module struct {
	name     string
	optional bool
}

// guestModules are the modules that the guest needs, in load order; loadOrder adds their
// dependencies. crc32 is before rdma_rxe because rxe asks the crypto layer for it by name,
// which no dependency file shows: without it `rdma link add` fails with "No such file or
// directory". It is optional because kernels from 6.14 on have crc32 as a library.
var guestModules = []module{
	{name: "virtio_pci"},
	{name: "virtio_console"},
	{name: "virtio_rng", optional: true},
	{name: "9pnet_virtio"},
	{name: "9p"},
	{name: "overlay"},
	{name: "virtio_net"},
	{name: "veth"},
	{name: "crc32c_generic", optional: true},
	{name: "crc32_generic", optional: true},
	{name: "crc32_pclmul", optional: true},
	{name: "rdma_rxe"},
	{name: "ib_uverbs"},
	{name: "rdma_ucm"},
}

// pmemModules are for NVDIMMs, loaded after guestModules by a machine that has some.
var pmemModules = []module{
	{name: "libnvdimm", optional: true},
	{name: "nfit", optional: true},
	{name: "nd_pmem", optional: true},
	{name: "device_dax", optional: true},
	{name: "dax_pmem", optional: true},
	{name: "ext4", optional: true},
}

// modulesDep holds the output of depmod: for each module, by name, its file and the files it
// needs.
type modulesDep struct {
	file  map[string]string
	needs map[string][]string
}

// moduleName returns crc32_pclmul for kernel/arch/x86/crypto/crc32-pclmul.ko.xz. The kernel
// treats dashes and underscores alike.
func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

func parseModulesDep(r io.Reader) (modulesDep, error) {
	dep := modulesDep{file: map[string]string{}, needs: map[string][]string{}}
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		file, needs, ok := strings.Cut(lines.Text(), ":")
		if !ok {
			return dep, fmt.Errorf("modules.dep: no colon in %q", lines.Text())
		}
		name := moduleName(file)
		dep.file[name] = file
		for _, f := range strings.Fields(needs) {
			dep.needs[name] = append(dep.needs[name], moduleName(f))
		}
	}
	return dep, lines.Err()
}

func parseModulesBuiltin(r io.Reader) (map[string]bool, error) {
	builtin := map[string]bool{}
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		builtin[moduleName(lines.Text())] = true
	}
	return builtin, lines.Err()
}

// loadOrder returns the files to insert, each behind its dependencies.
func loadOrder(want []module, dep modulesDep, builtin map[string]bool) ([]string, error) {
	var order []string
	const underway, done = 1, 2
	state := map[string]int{}
	var visit func(name, wantedBy string) error
	visit = func(name, wantedBy string) error {
		switch state[name] {
		case done:
			return nil
		case underway:
			return fmt.Errorf("modules.dep: %s needs itself, through %s", name, wantedBy)
		}
		file, ok := dep.file[name]
		if !ok {
			if builtin[name] {
				return nil
			}
			return fmt.Errorf("this kernel has no module %s, needed by %s", name, wantedBy)
		}
		state[name] = underway
		for _, n := range dep.needs[name] {
			if err := visit(n, name); err != nil {
				return err
			}
		}
		state[name] = done
		order = append(order, file)
		return nil
	}
	for _, m := range want {
		if _, ok := dep.file[m.name]; !ok && m.optional {
			continue
		}
		if err := visit(m.name, "the guest"); err != nil {
			return nil, err
		}
	}
	return order, nil
}
