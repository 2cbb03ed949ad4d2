package rxevm

import (
	"os"
	"strings"
	"syscall"
)

// usableAccel returns kvm if this process may open the device and the processor reports
// virtualisation. Some containers have the device without the processor feature; a guest
// started there dies or hangs in the decompressor.
func usableAccel() string {
	cpu, err := os.ReadFile("/proc/cpuinfo")
	if err != nil || !hasVirtualisation(string(cpu)) {
		return "tcg"
	}
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		return "tcg"
	}
	f.Close()
	return "kvm"
}

func hasVirtualisation(cpuinfo string) bool {
	for line := range strings.Lines(cpuinfo) {
		name, value, _ := strings.Cut(line, ":")
		if strings.TrimSpace(name) != "flags" {
			continue
		}
		for flag := range strings.FieldsSeq(value) {
			if flag == "vmx" || flag == "svm" {
				return true
			}
		}
		return false
	}
	return false
}
