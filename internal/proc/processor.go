package proc

import (
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"github.com/klauspost/cpuid/v2"
)

// Processor returns the name of the processor: by CPUID, or on AArch64 by its number in
// /proc/cpuinfo, which is read once.
var Processor = sync.OnceValue(func() string {
	if name := strings.TrimSpace(cpuid.CPU.BrandName); name != "" {
		return name
	}
	if name := armCore("/"); name != "" {
		return name
	}
	return runtime.GOARCH
})

// armCores are the cores of servers and workstations by implementer and part (MIDR_EL1).
var armCores = map[[2]string]string{
	{"0x41", "0xd08"}: "Arm Cortex-A72", {"0x41", "0xd0c"}: "Arm Neoverse N1", {"0x41", "0xd40"}: "Arm Neoverse V1",
	{"0x41", "0xd49"}: "Arm Neoverse N2", {"0x41", "0xd4f"}: "Arm Neoverse V2", {"0x41", "0xd83"}: "Arm Neoverse V3AE",
	{"0x41", "0xd84"}: "Arm Neoverse V3", {"0x41", "0xd8e"}: "Arm Neoverse N3", {"0x43", "0x0af"}: "Cavium ThunderX2",
	{"0x46", "0x001"}: "Fujitsu A64FX", {"0x48", "0xd01"}: "HiSilicon TaiShan v110",
	{"0xc0", "0xac3"}: "Ampere-1", {"0xc0", "0xac4"}: "Ampere-1a", {"0xc0", "0xac5"}: "Ampere-1b"}

// armCore returns the name of an AArch64 core. For an unknown core it gives the numbers. "" if
// /proc/cpuinfo has none. root is "/", or another folder for tests.
func armCore(root string) string {
	field := func(name string) string {
		_, value, _ := strings.Cut(line(filepath.Join(root, "proc/cpuinfo"), name), ":")
		return strings.TrimSpace(value)
	}
	implementer, part := field("CPU implementer"), field("CPU part")
	if implementer == "" || part == "" {
		return ""
	}
	if name, ok := armCores[[2]string{implementer, part}]; ok {
		return name
	}
	return "AArch64, implementer " + implementer + ", part " + part
}
