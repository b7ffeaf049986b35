package train

import (
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
)

// fits refuses a plan that is larger than the device, before any of it is allocated. Devices that do not say how much memory they have
// refuse the allocation itself.
func fits(d device.Device, plan []model.Component) error {
	info := d.Info()
	planned := model.Bytes(plan)
	if info.Memory == 0 || planned <= info.Memory {
		return nil
	}
	largest := plan[0]
	for _, c := range plan[1:] {
		if c.Bytes > largest.Bytes {
			largest = c
		}
	}
	const mib = 1 << 20
	return status.Errorf(status.OutOfMemory,
		"train: %.1f MiB are planned on this rank and %s has %.1f MiB; the largest part, %s, takes %.1f MiB: use more ranks, a shorter data.sequence, a smaller data.batch or a smaller model",
		float64(planned)/mib, info.Name, float64(info.Memory)/mib, largest.Name, float64(largest.Bytes)/mib)
}
