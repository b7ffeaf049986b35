package proc

import "testing"

// /proc/cpuinfo of AArch64 has numbers instead of a name.
func TestArmCore(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd sve2 bf16\nCPU implementer\t: 0x41\n" +
			"CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd4f\nCPU revision\t: 0\n", "Arm Neoverse V2"},
		{"CPU implementer\t: 0xc0\nCPU part\t: 0xac3\n", "Ampere-1"},
		{"CPU implementer\t: 0x61\nCPU part\t: 0x039\n", "AArch64, implementer 0x61, part 0x039"},
		{"processor\t: 0\nmodel name\t: another\n", ""},
	} {
		if got := armCore(folder(t, map[string]string{"proc/cpuinfo": c.text})); got != c.want {
			t.Errorf("%q of %q, want %q", got, c.text, c.want)
		}
	}
	if got := armCore(t.TempDir()); got != "" {
		t.Errorf("%q without /proc", got)
	}
	if Processor() == "" {
		t.Error("no name of this processor")
	}
}
