package job

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/internal/proc"
	"ulysses/internal/status"
	"ulysses/internal/units"
	"ulysses/job/launch"
	"ulysses/slurm"
)

// place is where a rank runs.
type place struct {
	Host   string
	Local  int     // index of the rank among the ranks of its node, if OnNode is known
	OnNode int     // ranks of its node; 0 = the launcher does not say
	Cores  string  // on which it may run, as "0-3,8-11"; "" = unknown
	CPUs   float64 // that the ranks of its node have in all, by Slurm or a container; 0 = unknown
	Kind   string  // of its device
	GPU    string  // UUID
	NUMA   int     // node of the GPU
	Near   string  // cores of this node; "" = unknown
}

// ownPlace returns where this rank runs, without its device.
func ownPlace(local, onNode int) place {
	host, _ := os.Hostname()
	return place{Host: host, Local: local, OnNode: onNode, Cores: proc.Cores(),
		CPUs: proc.CPULimit(slurm.Env().CPUs)}
}

// onNode returns the index of a rank among the ranks of its node, and their number. Some launchers
// do not say these, such as mpiexec of Cray and flux: then the ranks of a host are on one node.
// Otherwise each rank would use the first GPU, and plan with all memory of the node.
func onNode(all []place, rank int) (local, size int) {
	if !slices.ContainsFunc(all, func(p place) bool { return p.OnNode == 0 }) {
		return all[rank].Local, all[rank].OnNode
	}
	for r, p := range all {
		if p.Host == all[rank].Host {
			if r < rank {
				local++
			}
			size++
		}
	}
	return local, size
}

// withDevice adds the device of the rank. root is "/" except in tests.
func (p place) withDevice(kind, gpu, root string) place {
	p.Kind, p.GPU = kind, gpu
	p.NUMA, p.Near = proc.GPUNode(root, gpu)
	return p
}

// threadsOf returns how many threads a rank should have. perNode is the number of ranks of its
// node.
func threadsOf(all []place, rank, perNode int) int {
	cores := make([]proc.Place, len(all))
	for r, p := range all {
		cores[r] = proc.Place{Host: p.Host, Cores: p.Cores}
	}
	return proc.Threads(cores, rank, perNode, all[rank].CPUs)
}

// node is a machine with its ranks.
type node struct {
	host  string
	ranks []int
}

func nodesOf(all []place) (nodes []node) {
	for r, p := range all {
		i := slices.IndexFunc(nodes, func(n node) bool { return n.host == p.Host })
		if i < 0 {
			i, nodes = len(nodes), append(nodes, node{host: p.Host})
		}
		nodes[i].ranks = append(nodes[i].ranks, r)
	}
	return nodes
}

// gpus returns the number of different GPUs that the ranks of a node use.
func (n node) gpus(all []place) int {
	seen := map[string]bool{}
	for _, r := range n.ranks {
		if all[r].GPU != "" {
			seen[all[r].GPU] = true
		}
	}
	return len(seen)
}

// kindFault returns the error if some ranks have a GPU and others do not. It names two nodes.
func kindFault(all []place) error {
	other := slices.IndexFunc(all, func(p place) bool { return p.Kind != all[0].Kind })
	if other < 0 {
		return nil
	}
	describe := func(rank int) string {
		nodes := nodesOf(all)
		n := nodes[slices.IndexFunc(nodes, func(n node) bool { return n.host == all[rank].Host })]
		return fmt.Sprintf("rank %d on %s uses %s (%s there, %s)", rank, n.host, all[rank].Kind,
			units.Count(len(n.ranks), "rank"), units.Count(n.gpus(all), "GPU"))
	}
	return status.Errorf(status.InvalidConfig,
		"device.backend: %s, %s; give every node GPUs (srun --gpus-per-node), or set device.backend = \"cpu\"",
		describe(0), describe(other))
}

// placementWarnings returns what makes a job slower than it could be on these nodes. perSequence is
// the number of ranks of a sequence, which are neighbours. threads is device.threads; 0 = not set.
func placementWarnings(all []place, perSequence, threads int) (texts []string) {
	nodes := nodesOf(all)
	for _, n := range nodes[1:] {
		if first := nodes[0]; len(n.ranks) != len(first.ranks) {
			texts = append(texts,
				fmt.Sprintf(
					"launch: %s has %s and %s has %s: two-level all-to-alls are not possible; start the same number on each node (srun --ntasks-per-node, mpirun --map-by ppr:N:node)",
					first.host, units.Count(len(first.ranks), "rank"), n.host, units.Count(len(n.ranks), "rank")))
			break
		}
	}
	for _, n := range nodes {
		if gpus := n.gpus(all); gpus > 0 && gpus < len(n.ranks) {
			texts = append(texts,
				fmt.Sprintf(
					"device: the %s on %s share the memory and the speed of %s; start one rank for each GPU (srun --ntasks-per-node=%[4]d), or give the node more (--gpus-per-node=%[5]d)",
					units.Count(len(n.ranks), "rank"), n.host, units.Count(gpus, "GPU"), gpus, len(n.ranks)))
			break
		}
	}
	if text := scattered(all, nodes, perSequence); text != "" {
		texts = append(texts, text)
	}
	for r, p := range all {
		if cores := len(proc.CoreList(p.Cores)); cores > 0 && threads > cores {
			texts = append(texts,
				fmt.Sprintf(
					"device.threads = %d: rank %d on %s may run on %s (%s); give each rank more (srun --cpus-per-task=%[1]d, mpirun --bind-to none), or lower device.threads",
					threads, r, p.Host, units.Count(cores, "core"), p.Cores))
			break
		}
	}
	for r, p := range all {
		if far(p) {
			texts = append(texts,
				fmt.Sprintf(
					"device: rank %d on %s runs on cores %s, and its GPU is on NUMA node %d, whose cores are %s; bind ranks near their GPUs (srun --gpu-bind=closest, mpirun --map-by numa)",
					r, p.Host, p.Cores, p.NUMA, p.Near))
			break
		}
	}
	return texts
}

// far reports whether a rank may run on no core of the NUMA node of its GPU.
func far(p place) bool {
	near, own := proc.CoreList(p.Near), proc.CoreList(p.Cores)
	return len(near) > 0 && len(own) > 0 &&
		!slices.ContainsFunc(own, func(c int) bool { return slices.Contains(near, c) })
}

// scattered returns the warning for a sequence whose ranks are on several nodes, if the nodes are
// large enough to have each sequence on one node.
func scattered(all []place, nodes []node, perSequence int) string {
	for _, n := range nodes {
		if len(n.ranks)%perSequence != 0 {
			return ""
		}
	}
	for first := 0; first < len(all); first += perSequence {
		var hosts []string
		for _, p := range all[first : first+perSequence] {
			if !slices.Contains(hosts, p.Host) {
				hosts = append(hosts, p.Host)
			}
		}
		if len(hosts) > 1 {
			return fmt.Sprintf(
				"launch: ranks %d to %d share a sequence and are on %s, but a node has room for them; start neighbouring ranks on one node (srun --distribution=block, mpirun --map-by core)",
				first, first+perSequence-1, strings.Join(hosts, ", "))
		}
	}
	return ""
}

// seat is what a rank has of its node.
type seat struct {
	local, perNode int // its index among the ranks of its node, and their number
	threads        int // for work on the host
}

// findPlaces gathers where all ranks run, before they open devices. threads is device.threads; 0 =
// the rank's share of the cores. Collective.
func findPlaces(r launch.Rank, threads int64) (all []place, s seat, err error) {
	if all, err = comm.GatherJSON(r.World, "launch", ownPlace(r.Local, r.OnNode)); err != nil {
		return nil, s, err
	}
	rank := r.World.Rank()
	s.local, s.perNode = onNode(all, rank)
	if s.threads = int(threads); s.threads == 0 {
		s.threads = threadsOf(all, rank, s.perNode)
	}
	return all, s, nil
}

// checkPlaces gathers the devices of all ranks and refuses ranks with and without a GPU in one job.
// Collective: all ranks return the same error.
func (e *Env) checkPlaces(world comm.Comm) (err error) {
	if e.places, err = comm.GatherJSON(world, "device",
		ownPlace(e.local, e.perNode).withDevice(e.Device.Info().Kind, backends.GPUID(e.Device), "/")); err != nil {
		return err
	}
	return kindFault(e.places)
}

// warnOfPlaces logs what is slow about the places of the ranks. Goroutine ranks share a machine
// because the user has asked for it.
func (e *Env) warnOfPlaces() {
	if e.world.Kind() == "local" {
		if text := slurm.Env().Alone(); text != "" && e.world.Size() == 1 {
			e.Log.Warn().Msg(text)
		}
		return
	}
	for _, text := range placementWarnings(e.places, e.Mesh.Seq.Size(), int(e.Job.Device.Threads)) {
		e.Log.Warn().Msg(text)
	}
}
