package backends

import (
	"fmt"
	"os"

	"ulysses/comm"
	"ulysses/cuda"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// OpenComm returns the communicator for tensors of the device and of the host, and the reason for
// its choice. policy is device.comm of the job file: "auto", or the required kind. Tensors of a CPU
// device use the host's communicator. For GPUs, "auto" selects NCCL if every rank has its own GPU
// and its own process, else ipc if all ranks are on one machine, else staged. "mpi" and "local"
// select staged; "local" is refused for ranks that a launcher started. If "auto" selects ipc and
// the machine does not support it, staged is used. A kind that is not possible, or a rank without a
// device (nil), is an error on all ranks. OpenComm also tells each GPU how many ranks share it, for
// its memory plan. The result owns host. Collective over host.
func OpenComm(d device.Device, host comm.Comm, policy string) (c comm.Comm, why string, err error) {
	gpu, _ := d.(*cuda.Device)
	infos, err := gatherInfos(host, gpu, d)
	if err != nil {
		return nil, "", err
	}
	if gpu != nil {
		gpu.SharedBy(sharing(infos, host.Rank()))
	}
	kind, why, err := choose(infos, host.Kind(), route(host), policy)
	if err != nil {
		return nil, "", err
	}
	if kind == host.Kind() {
		return host, why, nil
	}
	made, err := cuda.NewComm(gpu, host, kind)
	// NewComm returns the same error code on all ranks
	if kind == "ipc" && policy == "auto" && status.Of(err) == status.Unsupported {
		why = fmt.Sprintf("staged %s: %v", route(host), err)
		made, err = cuda.NewComm(gpu, host, "staged")
	}
	if err != nil {
		return nil, "", err
	}
	return made, why, nil
}

// OwnProcess sets environment variables that libraries read when they are first used, unless the
// user has set them. Call it before any other function of this package, and only in a program of
// which no other part uses NCCL. With NCCL_LAUNCH_ORDER_IMPLICIT=1, communicators may use several
// streams, so that the sequence axis has one of its own.
func OwnProcess() {
	const order = "NCCL_LAUNCH_ORDER_IMPLICIT"
	if _, set := os.LookupEnv(order); !set {
		os.Setenv(order, "1")
	}
}

// route describes how the staged transport moves GPU tensors with the host's communicator.
func route(host comm.Comm) string {
	if x, ok := host.(comm.Direct); ok && x.TakesDeviceMemory() {
		return fmt.Sprintf("by %s, which accepts GPU memory; sums through host memory", host.Kind())
	}
	return "through host memory and " + host.Kind()
}

// rankInfo describes the device of a rank. All ranks gather all of them and make the same choice.
type rankInfo struct {
	Kind    string // "cpu", "cuda"; "" = no device
	Machine string
	Process string // equal for ranks of one process
	GPU     string // UUID
	NCCL    bool
	NoNCCL  string // why NCCL is not available
	// HostID is NCCL_HOSTID. NCCL treats ranks with different values as ranks on different
	// machines, which may share a GPU.
	HostID string
}

// gatherInfos returns the rankInfo of all ranks. Collective over host.
func gatherInfos(host comm.Comm, gpu *cuda.Device, d device.Device) ([]rankInfo, error) {
	var own rankInfo
	switch {
	case gpu != nil:
		own = rankInfo{Kind: "cuda", Machine: cuda.Machine(), Process: cuda.Process(), GPU: gpu.Details().UUID}
		own.NCCL, own.NoNCCL = cuda.HasNCCL()
		own.HostID = os.Getenv("NCCL_HOSTID")
	case d != nil:
		own.Kind = d.Info().Kind
	}
	return comm.GatherJSON(host, "device.comm", own)
}

// ShareFree sets Info.Free of the ranks' GPUs, for their plans of memory: the bytes that are free
// now on a GPU, divided by the ranks that share it, and the minimum of these over all ranks. It is
// called when every rank has its communicators, and before a rank allocates tensors. It does
// nothing for other devices; all ranks have the same kind of device. Collective over host.
func ShareFree(host comm.Comm, d device.Device) error {
	gpu, ok := d.(*cuda.Device)
	if !ok {
		return nil
	}
	if err := comm.Agree(host, nil); err != nil { // all ranks are here
		return err
	}
	free, err := gpu.FreeMemory()
	if err = comm.Agree(host, err); err != nil {
		return err
	}
	least := []int64{-free / int64(max(1, gpu.Info().Sharing))}
	if err := host.AllReduce(nil, tensor.OfInt64(least, 1), comm.Max); err != nil {
		return err
	}
	gpu.SetFree(max(1, -least[0]))
	return nil
}

// sharing returns the number of ranks that use the GPU of the given rank.
func sharing(infos []rankInfo, rank int) (n int) {
	for _, c := range infos {
		if c.GPU == infos[rank].GPU && c.Machine == infos[rank].Machine {
			n++
		}
	}
	return n
}

// choose returns the kind of communicator and the reason. host is the kind of the host's
// communicator and route is the text of the function route. The result is the same on all ranks.
func choose(infos []rankInfo, host, route, policy string) (kind, why string, err error) {
	for r, c := range infos {
		if c.Kind == "" {
			return "", "", status.Errorf(status.Device, "device.comm: rank %d has no device; see its error", r)
		}
		if c.Kind != infos[0].Kind {
			return "", "",
				status.Errorf(status.InvalidConfig,
					"device.comm: rank 0 uses device %s, rank %d uses %s; set device.backend to one of them",
					infos[0].Kind, r, c.Kind)
		}
	}
	if infos[0].Kind != "cuda" {
		return chooseHost(infos[0].Kind, host, policy)
	}
	noNCCL, noIPC, requested := whyNoNCCL(infos), whyNoIPC(infos), fmt.Sprintf("device.comm = %q", policy)
	hazard := whyNCCLMayHang(infos)
	switch policy {
	case "auto":
		switch {
		case len(infos) == 1:
			return "ipc", "ipc: there is one rank", nil
		case noNCCL == "" && hazard == "":
			return "nccl", fmt.Sprintf("nccl: each of %d ranks has its own GPU", len(infos)), nil
		case noIPC == "" && noNCCL == "":
			return "ipc", "ipc: " + hazard, nil
		case noNCCL == "":
			return "staged", fmt.Sprintf("staged %s: %s; ipc is not possible: %s", route, hazard, noIPC), nil
		case noIPC == "":
			return "ipc", fmt.Sprintf("ipc: all ranks are on one machine; nccl is not possible: %s", noNCCL), nil
		}
		return "staged", fmt.Sprintf("staged %s: nccl is not possible: %s; ipc is not possible: %s", route, noNCCL,
			noIPC), nil
	case "nccl":
		if noNCCL == "" && hazard != "" {
			requested += "; warning: " + hazard + `; device.comm = "ipc" cannot hang`
		}
		if noNCCL == "" {
			return "nccl", requested, nil
		}
		return "", "", status.Errorf(status.Unsupported,
			"device.comm = \"nccl\": %s; set device.comm to \"ipc\" (one machine) or \"mpi\", or start one rank for each GPU with NCCL",
			noNCCL)
	case "ipc":
		if noIPC == "" {
			return "ipc", requested, nil
		}
		return "", "", status.Errorf(status.Unsupported,
			"device.comm = \"ipc\": %s; set device.comm to \"nccl\" or \"mpi\"", noIPC)
	case "mpi", "local":
		if policy == "local" && host == "mpi" {
			return "", "", otherHost(policy, host)
		}
		return "staged", fmt.Sprintf("staged %s: %s", route, requested), nil
	}
	return "", "", status.Errorf(status.InvalidConfig, "device.comm = %q is unknown; use auto, nccl, ipc, mpi or local",
		policy)
}

// chooseHost is choose for devices with host memory.
func chooseHost(device, host, policy string) (kind, why string, err error) {
	switch {
	case policy == "auto" || policy == host:
		return host, "", nil
	case policy == "mpi" || policy == "local":
		return "", "", otherHost(policy, host)
	}
	return "", "", status.Errorf(status.Unsupported,
		"device.comm = %q is not possible with device %s; set device.comm = \"auto\"", policy, device)
}

// otherHost is the error for a policy that names another host communicator than the job has.
func otherHost(policy, host string) error {
	return status.Errorf(status.Unsupported,
		"device.comm = %q: the ranks of this job use %q; set device.comm = \"auto\"", policy, host)
}

// whyNoNCCL returns the reason why these ranks cannot use NCCL; "" if they can.
func whyNoNCCL(infos []rankInfo) string {
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

// whyNCCLMayHang returns the reason why NCCL may hang with these ranks; "" if each rank is a
// process of its own. NCCL's kernels wait for all ranks, and CUDA may delay an allocation, also one
// for the code of a kernel that runs for the first time, until the kernels of the process have
// finished (NCCL issue 787).
func whyNCCLMayHang(infos []rankInfo) string {
	first := map[string]int{}
	for r, c := range infos {
		if other, ok := first[c.Process]; ok && c.Process != "" {
			return fmt.Sprintf(
				"ranks %d and %d are threads of one process, in which nccl may hang while a rank allocates GPU memory",
				other, r)
		}
		first[c.Process] = r
	}
	return ""
}

// whyNoIPC returns the reason why these ranks cannot use ipc; "" if they can.
func whyNoIPC(infos []rankInfo) string {
	for r, c := range infos {
		if c.Machine != infos[0].Machine {
			return fmt.Sprintf("ranks 0 and %d are on different machines (%s, %s)", r, infos[0].Machine, c.Machine)
		}
	}
	if len(infos) > cuda.MaxRanks {
		return fmt.Sprintf("%d ranks are more than the maximum of %d", len(infos), cuda.MaxRanks)
	}
	return ""
}
