package train

import (
	"fmt"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
)

// inputBytes is the memory of ids, targets and positions.
func (t *Trainer) inputBytes() int64 {
	_, rows := t.MaxRows()
	return 2*device.Padded(t.Device, rows*4) + rows*4
}

// fits refuses a plan that is larger than the device, before any of it is allocated. Devices that
// do not say how much memory they have refuse the allocation itself.
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

// over refuses a choice that does not fit where [memory] or the device sets a limit. The model is
// set to it.
func (t *Trainer) over(x *Choice) error {
	if _, err := t.size(x); err != nil {
		return err
	}
	all := t.components(t.inputBytes())
	if n := t.Memory.Device; n > 0 {
		if err := within(all, false, int64(n*gib), "memory.device allows"); err != nil {
			return err
		}
	}
	if n := t.Memory.Host; n > 0 {
		if err := within(all, true, int64(n*gib), "memory.host allows"); err != nil {
			return err
		}
	}
	return fits(t.Device, all)
}

// within holds a plan, of the device's memory or of the host's, to a limit.
func within(plan []model.Component, host bool, limit int64, whose string) error {
	planned, remedy := model.Bytes(plan), "use more ranks, a shorter data.sequence, a smaller data.batch or a smaller model, and let the keys of [memory] and [tile] be \"auto\""
	if host {
		planned, remedy = model.HostBytes(plan), "raise it, or let fewer keys of [memory] be \"offload\""
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
	return status.Errorf(status.OutOfMemory, "train: %.1f MiB are planned on this rank and %s %.1f MiB; the largest part, %s, takes %.1f MiB: %s",
		float64(planned)/mib, whose, float64(limit)/mib, largest.Name, float64(largest.Bytes)/mib, remedy)
}
