package some

import (
	"testing"

	"ulysses/testkit/mpitest"
)

func TestDirect(t *testing.T) {
	for _, n := range mpitest.Sizes() {
		mpitest.Ranks(t, n, nil)
	}
}

func largest() int { sizes := mpitest.Sizes(); return sizes[len(sizes)-1] }

func onLargest(t *testing.T) { mpitest.Ranks(t, largest(), nil) }

func TestThroughHelper(t *testing.T) { onLargest(t) }

func TestAlone(t *testing.T) { t.Log("one rank") }

func TestMain(m *testing.M) { mpitest.Main(m) }
