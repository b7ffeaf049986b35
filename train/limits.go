package train

import (
	"fmt"
	"slices"

	"ulysses/device"
	"ulysses/internal/proc"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// fits returns an error for a plan that needs more memory than the device has. A device that does
// not report its memory returns an error for the allocation instead. stage is parallel.zero.
func fits(d device.Device, stage int, plan []model.Component) error {
	info := d.Info()
	if info.Memory == 0 {
		return nil
	}
	whose := info.Name + " has"
	if info.Sharing > 1 {
		whose = fmt.Sprintf("%s, which %d ranks share, has for each", info.Name, info.Sharing)
	}
	if info.Usable() == info.Memory {
		return within(plan, false, info.Memory, whose, fixOf(d, stage, plan))
	}
	whose += fmt.Sprintf(" %.1f MiB, of which contexts, communicators and other processes leave",
		float64(info.Memory)/mib)
	err := within(plan, false, info.Free, whose, fixOf(d, stage, plan))
	if err != nil && model.Bytes(plan) <= info.Memory {
		err = status.Errorf(status.OutOfMemory, "%w; or end other processes on the GPU (nvidia-smi lists them)", err)
	}
	return err
}

// fitsHost returns an error for a plan that needs more host memory than this rank may use; 0 =
// unknown. A device that computes in host memory has its own memory there as well. perNode is the
// number of ranks that share the host's memory, and stage is parallel.zero.
func fitsHost(d device.Device, free int64, perNode, stage int, plan []model.Component) error {
	if free == 0 {
		return nil
	}
	whose := "the host has free for it"
	if perNode > 1 {
		whose = fmt.Sprintf("the host has %.1f GiB free for %d ranks, for each",
			float64(free)*float64(perNode)/gib, perNode)
	}
	fix := hostFix
	if d.Info().Place == tensor.Host {
		plan, fix = slices.Clone(plan), "use more nodes, or "+shorter
		for i := range plan {
			plan[i].Host = true
		}
	}
	return inGroup(within(plan, true, free, whose, orZero(stage, fix)), free*int64(max(1, perNode)),
		func() (limit, total int64) {
			total, _ = proc.HostMemory()
			return proc.MemoryLimit(), total
		})
}

// inGroup adds to an error of fitsHost the limit of this process's control group, if this may be
// the reason. free is the free memory. memory returns the limit of the group (0 = none) and the
// memory of the machine; it reads files, and plans are checked many times.
func inGroup(err error, free int64, memory func() (limit, total int64)) error {
	if err == nil {
		return nil
	}
	limit, total := memory()
	if limit == 0 || limit >= total || free > limit {
		return err
	}
	return status.Errorf(status.OutOfMemory,
		"%w; the machine has %.1f GiB, of which the control group of the job may use %.1f GiB: raise that limit (--mem of Slurm, or the limit of the container)",
		err, float64(total)/gib, float64(limit)/gib)
}

// Fixes of a plan that exceeds a limit.
const (
	shorter   = "set a shorter data.sequence or a smaller data.batch, and leave the keys of activations in [memory] and the keys of [tile] at \"auto\""
	deviceFix = "use more ranks, or " + shorter
	hostFix   = "use more nodes, raise memory.host if it is set, or set fewer keys of [memory] to \"offload\""
)

// orZero adds ZeRO to a fix, unless it is in use: without it, each of more ranks has as much of the
// training state.
func orZero(stage int, fix string) string {
	if stage == 3 {
		return fix
	}
	return fmt.Sprintf("divide the training state among the ranks with parallel.zero = 3 (it is %d), %s", stage, fix)
}

// fixOf returns the fix of a plan that needs more memory than a device may use. If the optimizer's
// states are in the memory of a GPU, a shorter sequence alone may not be enough, and the host may
// have room for them. The slots through which they would pass need less memory than they do, unless
// the model is small.
func fixOf(d device.Device, stage int, plan []model.Component) string {
	fix, states := orZero(stage, deviceFix), int64(0)
	for _, c := range plan {
		if !c.Host && isState(c) {
			states += c.Bytes
		}
	}
	const slots = 2 * 3 * 4 * defaultBucket // master weights and two moments in F32
	if d.Info().Place == tensor.Host || states <= slots {
		return fix
	}
	return "move the optimizer's states to host memory with memory.optimizer = \"offload\", " + fix
}

// within returns an error for a plan that exceeds a limit of the device's memory, or of the host's.
func within(plan []model.Component, host bool, limit int64, whose, fix string) error {
	planned, where := model.Bytes(plan), ""
	if host {
		planned, where = model.HostBytes(plan), "of host memory "
	}
	if planned <= limit {
		return nil
	}
	var largest model.Component
	for _, c := range plan {
		if c.Host == host && c.Bytes > largest.Bytes {
			largest = c
		}
	}
	return status.Errorf(status.OutOfMemory,
		"train: %.1f MiB %sare planned on this rank, but %s %.1f MiB; the largest allocation is %s with %.1f MiB; %s",
		float64(planned)/mib, where, whose, float64(limit)/mib, largest.Name, float64(largest.Bytes)/mib, fix)
}
