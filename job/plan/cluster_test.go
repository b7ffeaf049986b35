package plan

import (
	"testing"

	"ulysses/dryrun"
	"ulysses/job/file"
)

// A rate of a cluster file replaces all measured rates of its kind of work.
func TestGivenRates(t *testing.T) {
	m := &Machine{Rates: dryrun.Rates{Delta: 1e9, DeltaBack: 5e9, Memory: 1e9, PerNode: 1}}
	applyRates(&file.Cluster{PerNode: 2}, m)
	if r := m.Rates; r.Delta != 1e9 || r.DeltaBack != 5e9 || r.PerNode != 2 {
		t.Errorf("without rates: %+v", r)
	}
	applyRates(&file.Cluster{PerNode: 1, Rates: file.ClusterRates{Delta: 3}}, m)
	if r := m.Rates; r.Delta != 3e12 || r.DeltaBack != 0 || r.Memory != 1e9 {
		t.Errorf("with rates.delta = 3: %+v", r)
	}
}
