package rxevm

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The script runs under the host's shell here. The guest runs the same binary.
func TestScriptKeepsEveryByte(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a 'dir' $HOME")
	require.NoError(t, os.Mkdir(dir, 0o755))
	j, err := Job{
		Command: []string{"/bin/sh", "-c", `pwd; printf '<%s>' "$@"; echo; printf '<%s>' "$ODD" "$RXE_ROLE" "$RXE_GID_INDEX" "$HOME"`,
			"sh", "a b", "", `it's`, "$HOME", "`id`", "back\\slash", "new\nline", "-n", "*"},
		Dir: dir,
		Env: []string{"ODD=two\nlines of 'quotes' and $(id)", "not a variable", "=nor this", "-u=nor this"},
	}.withDefaults()
	require.NoError(t, err)
	script := filepath.Join(t.TempDir(), "command")
	require.NoError(t, os.WriteFile(script, []byte(j.sides()[0].script(j)), 0o600))

	cmd := exec.Command("/bin/sh", script)
	cmd.Env = []string{"RXE_GID_INDEX=3", "HOME=/must/not/leak", "PATH=/usr/bin:/bin"}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, dir+"\n<a b><><it's><$HOME><`id`><back\\slash><new\nline><-n><*>\n"+
		"<two\nlines of 'quotes' and $(id)><both><3><>", string(out))
}

func TestSidesPointAtEachOther(t *testing.T) {
	one := Job{}.sides()
	require.Len(t, one, 1)
	require.Equal(t, one[0].self, one[0].peer)
	require.Equal(t, "veth", one[0].link)

	two := Job{Two: true}.sides()
	require.Len(t, two, 2)
	for i, s := range two {
		require.Equal(t, s.peer, two[1-i].self)
		require.Equal(t, s.peer6, two[1-i].self6)
		require.NotEqual(t, s.mac, two[1-i].mac)
		require.Equal(t, "eth0", s.link)
	}
	require.Equal(t, "server", two[0].role)
	require.Equal(t, "client", two[1].role)
}

func TestJobRefuses(t *testing.T) {
	for says, j := range map[string]Job{
		"and two machines":  {Command: []string{"true"}, SharedMiB: 128},
		"no command":        {},
		"equals sign":       {Command: []string{"A=b"}},
		"memory of 100 MiB": {Command: []string{"true"}, MemoryMiB: 100},
		"memory of -1 MiB":  {Command: []string{"true"}, MemoryMiB: -1},
		"NVDIMMs of 63":     {Command: []string{"true"}, PmemMiB: 63},
		"65 processors":     {Command: []string{"true"}, CPUs: 65},
		"-2 processors":     {Command: []string{"true"}, CPUs: -2},
		"acceleration":      {Command: []string{"true"}, Accel: "hvf"},
		"results directory": {Command: []string{"true"}, OutDir: "/"},
	} {
		_, err := (*Image)(nil).Run(t.Context(), j)
		require.ErrorContains(t, err, says)
	}
	_, err := (*Image)(nil).Run(t.Context(), Job{Command: []string{"true"}})
	require.ErrorContains(t, err, "Prepare first")
}

func TestQemuArgs(t *testing.T) {
	im := &Image{vmlinuz: "/c/vmlinuz", vmlinux: "/c/vmlinux", initrd: "/c/initrd"}
	args := strings.Join(qemuArgs(im, hardware{accel: "tcg", memoryMiB: 512, cpus: 3, jobDir: "/tmp/j", outDir: "/tmp/a,b"}), " ")
	require.Contains(t, args, "-accel tcg,thread=multi -cpu max,-erms,-fsrm")
	require.Contains(t, args, "-smp 3 -m 512M")
	require.Contains(t, args, "-kernel /c/vmlinux ")
	require.Contains(t, strings.Join(qemuArgs(&Image{vmlinuz: "/c/vmlinuz"}, hardware{accel: "tcg"}), " "), "-kernel /c/vmlinuz ", "where there is no other")
	require.Contains(t, args, "mount_tag=root,path=/,security_model=none,readonly=on")
	require.Contains(t, args, "path=/tmp/a,,b,", "a comma would begin another option")
	require.NotContains(t, args, "path=/tmp/a,,b,security_model=none,readonly")
	require.Contains(t, args, "-net none")
	require.NotContains(t, args, "-netdev")

	require.NotContains(t, args, "nvdimm")
	args = strings.Join(qemuArgs(im, hardware{accel: "tcg", memoryMiB: 512, cpus: 3, jobDir: "/tmp/j", pmemDir: "/tmp/a,b", pmemMiB: 128}), " ")
	require.Contains(t, args, "-m 512M,slots=2,maxmem=2048M")
	require.Contains(t, args, "mitigations=off tsc=reliable rxevm.pmem ")
	require.Contains(t, args, "-object memory-backend-file,id=pm1,share=on,mem-path=/tmp/a,,b/nvdimm1,size=128M -device nvdimm,id=nv1,memdev=pm1,node=1")
	require.Contains(t, args, "-object memory-backend-ram,id=ram0,size=384M -numa node,nodeid=0,memdev=ram0,cpus=0-1 -object memory-backend-ram,id=ram1,size=128M -numa node,nodeid=1,memdev=ram1,cpus=2")

	wire, err := newWire()
	require.NoError(t, err)
	defer wire[0].Close()
	defer wire[1].Close()
	args = strings.Join(qemuArgs(im, hardware{accel: "tcg", memoryMiB: 512, cpus: 1, jobDir: "/tmp/j", pmemDir: "/tmp/a", pmemMiB: 128, shared: true}), " ")
	require.Contains(t, args, "share=on,mem-path=/tmp/a/nvdimm0,size=128M")
	require.NotContains(t, args, "nvdimm1")

	args = strings.Join(qemuArgs(im, hardware{accel: "kvm", jobDir: "/tmp/j", link: wire[0], mac: "52:54:00:09:00:01"}), " ")
	require.Contains(t, args, "-accel kvm -cpu max -smp")
	require.Contains(t, args, "-kernel /c/vmlinuz ")
	require.NotContains(t, args, "tsc=")
	require.Contains(t, args, "-netdev socket,id=n0,fd=6 -device virtio-net-pci,netdev=n0,romfile=,mac=52:54:00:09:00:01")
	require.NotContains(t, args, "mount_tag=out")
}

func TestLinesOfTwoMachinesDoNotMix(t *testing.T) {
	var b bytes.Buffer
	s := Job{Two: true, Stdout: &b, Stderr: &b}.sides()
	fmt.Fprint(s[0].stdoutTo, "one\nhalf ")
	fmt.Fprint(s[1].stdoutTo, "two\n\nend")
	fmt.Fprint(s[0].errorTo, "oops\n")
	fmt.Fprint(s[0].stdoutTo, "line\n")
	for _, x := range s {
		x.flush()
	}
	require.Equal(t, "server| one\nclient| two\nclient| \nserver| oops\nserver| half line\nclient| end\n", b.String())

	b.Reset()
	long := strings.Repeat("x", 3*maxLine)
	fmt.Fprint(s[0].stdoutTo, long)
	require.LessOrEqual(t, len(s[0].stdoutTo.(*linePrefix).line), maxLine, "held back without bound")
}

func TestTailKeepsTheEnd(t *testing.T) {
	c := tail{limit: 5}
	fmt.Fprint(&c, "abc")
	fmt.Fprint(&c, "defgh")
	require.Equal(t, "defgh", c.String())
}

func TestKVMNeedsTheProcessorFeature(t *testing.T) {
	require.True(t, hasVirtualisation("model name\t: x\nflags\t\t: fpu vmx sse\n"))
	require.True(t, hasVirtualisation("flags\t\t: svm\n"))
	require.False(t, hasVirtualisation("model name\t: svm vmx\nflags\t\t: fpu svm_lock\n"))
	require.False(t, hasVirtualisation(""))
}

// The line that announces another boot says why the first guest stopped.
func TestLastWords(t *testing.T) {
	m := &machine{console: &tail{limit: consoleTail}}
	crash := m.crash("the virtual machine ended while booting")
	require.Equal(t, "the virtual machine ended while booting", lastWords(crash))
	m.console.Write([]byte("[    1.2] loop: module loaded\n[    1.3] last"))
	require.Equal(t, "the virtual machine ended while booting; [    1.3] last", lastWords(m.crash("the virtual machine ended while booting")))
	m.console.Write([]byte("\n[    1.4] BUG: unable to handle page fault for address: 0\n[    1.5] Call Trace:\n[    1.6] Kernel panic - not syncing: Fatal exception\n[    1.7] ---[ end"))
	require.Equal(t, "server: x; [    1.4] BUG: unable to handle page fault for address: 0; [    1.6] Kernel panic - not syncing: Fatal exception",
		lastWords(fmt.Errorf("server: %w", m.crash("x"))))
}
