package train

import (
	"fmt"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
)

const gib = 1 << 30

// fits refuses a plan that needs more memory than the device has, before anything is allocated.
// Devices that do not report their memory refuse the allocation itself.
func fits(d device.Device, plan []model.Component) error {
	info := d.Info()
	if info.Memory == 0 {
		return nil
	}
	whose := info.Name + " has"
	if info.Sharing > 1 {
		whose = fmt.Sprintf("%s, which %d ranks share, has for each", info.Name, info.Sharing)
	}
	return within(plan, false, info.Memory, whose)
}

// within refuses a plan of the device's memory, or of the host's, that exceeds a limit.
func within(plan []model.Component, host bool, limit int64, whose string) error {
	planned, fix := model.Bytes(plan), "use more ranks, a shorter data.sequence, a smaller data.batch or a smaller model, and let the keys of [memory] and [tile] be \"auto\""
	if host {
		planned, fix = model.HostBytes(plan), "raise it, or let fewer keys of [memory] be \"offload\""
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
	const mib = 1 << 20
	return status.Errorf(status.OutOfMemory, "train: %.1f MiB are planned on this rank, but %s %.1f MiB; the largest allocation is %s with %.1f MiB; %s",
		float64(planned)/mib, whose, float64(limit)/mib, largest.Name, float64(largest.Bytes)/mib, fix)
}
