package supervise

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/flight"
)

// After a rank has died, a spare node takes the place of its node, dead nodes are left out, and
// with fewer nodes than the job wants the program chooses the mesh.
func TestNodes(t *testing.T) {
	gone := &flight.Diagnosis{Culprits: []flight.Culprit{{Rank: 1, Host: "n2"}},
		Ranks: []flight.Standing{{}, {Condition: flight.Gone}}}
	whole := &flight.Diagnosis{Culprits: []flight.Culprit{{Rank: 1, Host: "n2.example.org"}}, Ranks: gone.Ranks}
	late := &flight.Diagnosis{Culprits: gone.Culprits, Ranks: []flight.Standing{{}, {Condition: flight.Between}}}
	fewer := func(before, now int) []string { return []string{fmt.Sprintf("%d instead of %d", now, before)} }
	for name, x := range map[string]struct {
		launcher string
		nodes    []string
		why      *flight.Diagnosis
		states   map[string]string
		want     string
	}{
		"the first attempt": {"srun -N2", []string{"n1", "n2", "n3"}, nil, nil, "srun -N2 | p job"},
		"a spare": {"srun -N2", []string{"n1", "n2", "n3"}, gone, nil,
			"srun -N2 --nodes=2 --nodelist=n1,n3 | p job"},
		"a host with its domain": {"srun -N2", []string{"n1", "n2", "n3"}, whole, nil,
			"srun -N2 --nodes=2 --nodelist=n1,n3 | p job"},
		"no spare": {"srun -N 3", []string{"n1", "n2", "n3"}, gone, nil,
			"srun -N 3 --nodes=3 --nodelist=n1,n2,n3 | p job"},
		"a late rank": {"srun --nodes=2", []string{"n1", "n2", "n3"}, late, nil,
			"srun --nodes=2 --nodes=2 --nodelist=n1,n2 | p job"},
		"a dead node": {"srun -n 12", []string{"n1", "n2", "n3"}, gone, map[string]string{"n2": "down*"},
			"srun -n 12 --nodes=2 --nodelist=n1,n3 --ntasks=8 | p job 8 instead of 12"},
		"a dead node and a spare": {"/usr/bin/srun -N 2 -n 8", []string{"n1", "n2", "n3"}, late,
			map[string]string{"n1": "drained"},
			"/usr/bin/srun -N 2 -n 8 --nodes=2 --nodelist=n2,n3 --ntasks=8 | p job"},
		"tasks of a node": {"srun --ntasks-per-node=4", []string{"n1", "n2"}, late,
			map[string]string{"n1": "down"}, "srun --ntasks-per-node=4 --nodes=1 --nodelist=n2 --ntasks=4 | p job 4 instead of 8"},
		"a program that starts the rank": {"srun -uN 3 --mpi=pmix --label -K numactl -N 1 --membind 1", []string{"n1", "n2",
			"n3"}, gone, map[string]string{"n2": "down"},
			"srun -uN 3 --mpi=pmix --label -K --nodes=2 --nodelist=n1,n3 numactl -N 1 --membind 1 | p job 0 instead of 0"},
		"excluded nodes": {"srun -x n[3-4]", []string{"n1", "n2", "n3", "n4"}, late, nil, "srun -x n[3-4] --nodes=2 --nodelist=n1,n2 | p job"},
		"no spare but an excluded node": {"srun -n 4 --exclude=n3 -N2", []string{"n1", "n2", "n3"}, late,
			map[string]string{"n1": "down"},
			"srun -n 4 --exclude=n3 -N2 --nodes=1 --nodelist=n2 --ntasks=2 | p job 2 instead of 4"},
		"named nodes": {"srun -N2 -w n[3-4]", []string{"n1", "n2", "n3", "n4"}, late, nil,
			"srun -N2 -w n[3-4] --nodes=2 --nodelist=n3,n4 | p job"},
		"named nodes and a spare": {"srun -N2 --nodelist n[3-4]", []string{"n1", "n2", "n3", "n4"}, late,
			map[string]string{"n3": "down"}, "srun -N2 --nodelist n[3-4] --nodes=2 --nodelist=n4,n1 | p job"},
		"nodes by number": {"srun -N2 -r1", []string{"n1", "n2", "n3"}, gone, nil, "srun -N2 -r1 | p job"},
		"a range": {"srun -N 1-2", []string{"n1", "n2", "n3"}, gone, nil,
			"srun -N 1-2 --nodes=2 --nodelist=n1,n3 | p job"},
		"letters together": {"srun -un4 -KN 2", []string{"n1", "n2", "n3"}, gone, nil,
			"srun -un4 -KN 2 --nodes=2 --nodelist=n1,n3 --ntasks=4 | p job"},
		"mpirun": {"mpirun -n 8", []string{"n1", "n2"}, gone, map[string]string{"n2": "down"},
			"mpirun -n 8 | p job"},
		"no allocation": {"srun -N2", nil, gone, nil, "srun -N2 | p job"},
	} {
		c := &cluster{nodes: x.nodes, states: func([]string) (map[string]string, error) { return x.states, nil },
			expand: func(list string) []string {
				return strings.Split(strings.ReplaceAll(list, "n[3-4]", "n3,n4"), ",")
			}}
		if x.why != nil {
			c.exclude(x.why, false)
		}
		launcher, program, err := c.command(&Options{Launcher: strings.Fields(x.launcher),
			Program: []string{"p", "job"}, Fewer: fewer, Log: func(string) {}})
		if got := strings.Join(launcher, " ") + " | " + strings.Join(program, " "); err != nil || got != x.want {
			t.Errorf("%s: %s %v, want %s", name, got, err, x.want)
		}
	}
	c := &cluster{nodes: []string{"n1"}, again: true, states: func([]string) (map[string]string, error) {
		return map[string]string{"n1": "down"}, nil
	}}
	o := &Options{Launcher: []string{"srun"}, Log: func(string) {}}
	if _, _, err := c.command(o); err == nil || !strings.Contains(err.Error(), "no node of n1 is left") {
		t.Error(err)
	}
	c.states = func([]string) (map[string]string, error) { return nil, errors.New("no controller") }
	if launcher, _, err := c.command(o); err != nil || !slices.Equal(launcher, o.Launcher) {
		t.Error(launcher, err)
	}
}

// The options of srun end at its first word that is neither an option nor the value of one.
func TestOwnWords(t *testing.T) {
	for launcher, want := range map[string]int{
		"srun":                                    1,
		"srun -N 2 -n4 --mpi=pmix":                5,
		"srun --nodes 2 --mpi pmix bash x":        5,
		"srun -K -l bash -l":                      3,
		"srun -lN2 bash":                          2,
		"srun -lN 2 bash":                         3,
		"srun --kill-on-bad-exit --exclusive env": 3,
		"srun --kill-on-bad-exit=1 env -i":        2,
		"srun -n 2 -- env -i":                     3,
		"srun -K1 -I5 env -i":                     3,
		"srun --overlap -":                        2,
	} {
		if _, got := options(strings.Fields(launcher)); got != want {
			t.Errorf("%s: %d words, want %d", launcher, got, want)
		}
	}
}
