package backends

import (
	"fmt"
	"os"

	"ulysses/comm"
	"ulysses/cuda"
	"ulysses/device"
	"ulysses/internal/status"
)

// OpenComm gives the communicator for tensors of the device and of the host, and says why it is
// this one. The policy is the job file's device.comm: "auto", or the way that is wanted. A CPU's
// tensors go by the host's own communicator. Tensors of a GPU go by NCCL where every rank has a GPU
// of its own; by each other's memory (ipc) on one machine; else through the host ("mpi" and "local"
// ask for that). All ranks call it. One that cannot be is refused on all of them, but ipc that was
// not asked for gives way to the host; a rank without a device (nil) makes it fail on all. From
// here on a GPU plans with its part of a memory that ranks share.
func OpenComm(d device.Device, host comm.Comm, policy string) (c comm.Comm, why string, err error) {
	gpu, _ := d.(*cuda.Device)
	infos, err := gather(host, gpu, d)
	if err != nil {
		return nil, "", err
	}
	if gpu != nil {
		gpu.SharedBy(sharing(infos, host.Rank()))
	}
	kind, why, err := choose(infos, host.Kind(), through(host), policy)
	if err != nil {
		return nil, "", err
	}
	if kind == host.Kind() {
		return host, why, nil
	}
	made, err := cuda.NewComm(gpu, host, kind)
	// the same on all ranks
	if kind == "ipc" && policy == "auto" && status.Of(err) == status.Unsupported {
		why = fmt.Sprintf("staged %s: %v", through(host), err)
		made, err = cuda.NewComm(gpu, host, "staged")
	}
	if err != nil {
		return nil, "", err
	}
	return made, why, nil
}

// through says how tensors of a GPU go by the host's communicator.
func through(host comm.Comm) string {
	if x, ok := host.(comm.Direct); ok && x.TakesDeviceMemory() {
		return fmt.Sprintf("by %s, which says that it takes memory of GPUs; sums through host memory", host.Kind())
	}
	return "through host memory and " + host.Kind()
}

// rankInfo is what a rank says of its device, for all to choose alike.
type rankInfo struct {
	Kind    string // "cpu", "cuda", "" = none
	Machine string
	GPU     string // uuid
	NCCL    bool
	NoNCCL  string // why not
	// NCCL_HOSTID: NCCL takes ranks with different ones to be on different machines, and lets them
	// share a GPU
	HostID string
}

func gather(host comm.Comm, gpu *cuda.Device, d device.Device) ([]rankInfo, error) {
	var own rankInfo
	switch {
	case gpu != nil:
		own = rankInfo{Kind: "cuda", Machine: cuda.Machine(), GPU: gpu.Details().UUID}
		own.NCCL, own.NoNCCL = cuda.HasNCCL()
		own.HostID = os.Getenv("NCCL_HOSTID")
	case d != nil:
		own.Kind = d.Info().Kind
	}
	return comm.GatherJSON(host, "device.comm", own)
}

// sharing is how many of the ranks compute on the GPU of one of them.
func sharing(infos []rankInfo, rank int) (n int) {
	for _, c := range infos {
		if c.GPU == infos[rank].GPU && c.Machine == infos[rank].Machine {
			n++
		}
	}
	return n
}

// choose is the kind of communicator that the ranks take, and why; through says how the host's
// would serve a GPU. It is the same on all ranks.
func choose(infos []rankInfo, host, through, policy string) (kind, why string, err error) {
	for r, c := range infos {
		if c.Kind == "" {
			return "", "", status.Errorf(status.Device, "device.comm: rank %d has no device", r)
		}
		if c.Kind != infos[0].Kind {
			return "", "", status.Errorf(status.InvalidConfig, "device.comm: rank 0 computes on device %s, rank %d on %s: set device.backend to one of them", infos[0].Kind, r, c.Kind)
		}
	}
	if infos[0].Kind != "cuda" {
		return chooseHost(infos[0].Kind, host, policy)
	}
	noNCCL, noIPC, asked := withoutNCCL(infos), withoutIPC(infos), fmt.Sprintf("device.comm = %q", policy)
	switch policy {
	case "auto":
		switch {
		case len(infos) == 1:
			return "ipc", "ipc: one rank alone", nil
		case noNCCL == "":
			return "nccl", fmt.Sprintf("nccl: each of %d ranks has a GPU of its own", len(infos)), nil
		case noIPC == "":
			return "ipc", fmt.Sprintf("ipc: all ranks are on one machine, and for nccl %s", noNCCL), nil
		}
		return "staged", fmt.Sprintf("staged %s: for nccl %s; for ipc %s", through, noNCCL, noIPC), nil
	case "nccl":
		if noNCCL == "" {
			return "nccl", asked, nil
		}
		return "", "", status.Errorf(status.Unsupported, "device.comm = \"nccl\": %s: say \"ipc\" (one machine) or \"mpi\", or start one rank a GPU with NCCL", noNCCL)
	case "ipc":
		if noIPC == "" {
			return "ipc", asked, nil
		}
		return "", "", status.Errorf(status.Unsupported, "device.comm = \"ipc\": %s: say \"nccl\" or \"mpi\"", noIPC)
	case "mpi", "local":
		return "staged", fmt.Sprintf("staged %s: %s", through, asked), nil
	}
	return "", "", status.Errorf(status.InvalidConfig, "device.comm = %q: auto, nccl, ipc, mpi or local", policy)
}

// chooseHost is for a device whose memory is the host's.
func chooseHost(device, host, policy string) (kind, why string, err error) {
	switch {
	case policy == "auto" || policy == host:
		return host, "", nil
	case policy == "mpi" || policy == "local":
		return "", "", status.Errorf(status.Unsupported, "device.comm = %q: these ranks were started as %q: say \"auto\"", policy, host)
	}
	return "", "", status.Errorf(status.Unsupported, "device.comm = %q on device %s: say \"auto\"", policy, device)
}

// withoutNCCL is why NCCL cannot serve these ranks; "" when it can.
func withoutNCCL(infos []rankInfo) string {
	first := map[string]int{}
	for r, c := range infos {
		if !c.NCCL {
			return fmt.Sprintf("rank %d has no NCCL (%s)", r, c.NoNCCL)
		}
		key := c.Machine + " " + c.GPU + " " + c.HostID
		if other, ok := first[key]; ok {
			return fmt.Sprintf("ranks %d and %d share %s", other, r, c.GPU)
		}
		first[key] = r
	}
	return ""
}

// withoutIPC is why ranks cannot reach each other's memory; "" when they can.
func withoutIPC(infos []rankInfo) string {
	for r, c := range infos {
		if c.Machine != infos[0].Machine {
			return fmt.Sprintf("ranks 0 and %d are on different machines (%s, %s)", r, infos[0].Machine, c.Machine)
		}
	}
	if len(infos) > cuda.MaxRanks {
		return fmt.Sprintf("%d ranks are more than the %d that are built", len(infos), cuda.MaxRanks)
	}
	return ""
}
