package cuda

import (
	"fmt"
	"slices"
	"strings"
)

// Assumed latencies, in clocks. The assembler writes into each instruction how many clocks to wait
// before the next one, and for which barriers; an instruction without a fixed latency opens a
// barrier when its result is there. An HMMA occupies the tensor cores of a quarter of a
// multiprocessor at 62 % of the rate of wgmma.
const (
	sharedLatency, otherLatency, readLatency = 35, 40, 12 // readLatency: until operands have been read
	takenBranch                              = 8
	hmmaClocks                               = 6.4
	rareCode                                 = 64 // a branch over more instructions skips a rare case
)

// step is one pass through a loop.
type step struct {
	all, hmma int
	clocks    float64
}

// target returns the instruction to which a branch at `at` jumps.
func (i instruction) target(at int) (to int, ok bool) {
	if !i.is(opBRA) {
		return 0, false
	}
	// 56 bits, in units of 4 bytes from the next instruction
	offset := int64((i.high&0x3ffff<<38|i.low>>34<<8|i.low>>16&0xff)<<8) >> 8
	return at + 1 + int(offset/4), offset%4 == 0
}

// oneStep executes a loop that ends with a branch to its start. Branches over more than rareCode
// are taken, other conditional branches are not.
func oneStep(loop []instruction) (s step) {
	const opLDS, opMOVM = 0x984, 0x23a
	var opened [6]float64
	cores := 0.0 // when the tensor cores are free
	for at := 0; at < len(loop); {
		i := loop[at]
		control := i.high >> 41
		for b := range opened {
			if control>>(11+b)&1 != 0 {
				s.clocks = max(s.clocks, opened[b])
			}
		}
		latency := float64(otherLatency)
		switch {
		case i.is(opHMMA):
			s.clocks = max(s.clocks, cores)
			cores = s.clocks + hmmaClocks
			s.hmma++
		case i.is(opLDS), i.is(opLDSM), i.is(opMOVM):
			latency = sharedLatency
		}
		if b := control >> 5 & 7; b < 6 { // the result has been written
			opened[b] = max(opened[b], s.clocks+latency)
		}
		if b := control >> 8 & 7; b < 6 { // the operands have been read
			opened[b] = max(opened[b], s.clocks+readLatency)
		}
		s.all++
		s.clocks += max(1, float64(control&15))
		to, branch := i.target(at)
		if always := i.low>>12&15 == 7; branch && at+1 < len(loop) && (always || to > at+rareCode) {
			s.clocks += takenBranch
			at = to
		} else {
			at++
		}
	}
	return s
}

// stepsTable returns a table of the steps of the scans of the gated delta rule.
func stepsTable(kernels map[string]*machineCode, names map[string]string) string {
	var rows []string
	for symbol, k := range kernels {
		if strings.Contains(names[symbol], "delta_scan_") && k.step.hmma > 0 {
			rows = append(rows,
				fmt.Sprintf("| `%s` | %d | %d | %.0f |\n", names[symbol], k.step.all, k.step.hmma, k.step.clocks))
		}
	}
	if len(rows) == 0 {
		return ""
	}
	slices.Sort(rows)
	return "\nA step of a scan, for a full chunk, by one warp that is alone on its quarter of a multiprocessor:\n\n| kernel | instructions | HMMA | clocks |\n|---|---|---|---|\n" +
		strings.Join(rows, "")
}
