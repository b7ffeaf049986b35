package train

import (
	"errors"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
)

// plan sizes the activations of the longest batch. Where nobody said whether the MLP runs in tiles, it does if without them more than nine
// tenths of some rank's device are planned: they cost time. Devices that do not say how much memory they have, as the CPU, have enough.
// Collective.
func (t *Trainer) plan() (err error) {
	tokens, rows := t.MaxRows()
	t.planned, err = t.Model.Memory(rows, tokens, t.Train != nil)
	tiles := t.Model.Tiles()
	if tiles.MLP != model.TileAuto {
		return err
	}
	c := t.counts.Int64s()
	if c[0], c[1] = 0, 0; err == nil && crowded(t.Device, t.components(t.inputBytes())) {
		c[0] = 1
	}
	if e := t.Mesh.World.AllReduce(nil, t.counts, comm.Max); e != nil || err != nil || c[0] == 0 {
		return errors.Join(err, e)
	}
	tiles.MLP = t.Model.MLPTile()
	if err = t.Model.SetTiles(tiles); err == nil {
		t.planned, err = t.Model.Memory(rows, tokens, t.Train != nil)
	}
	return err
}

// crowded reports a plan that leaves less than a tenth of the device.
func crowded(d device.Device, plan []model.Component) bool {
	all := d.Info().Memory
	return all > 0 && model.Bytes(plan) > all-all/10
}

// inputBytes is the memory of ids, targets and positions.
func (t *Trainer) inputBytes() int64 {
	_, rows := t.MaxRows()
	return 2*device.Padded(t.Device, rows*4) + rows*4
}

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
		"train: %.1f MiB are planned on this rank and %s has %.1f MiB; the largest part, %s, takes %.1f MiB: use more ranks, a shorter data.sequence, a smaller data.batch or a smaller model, and let tile.mlp and tile.loss be \"auto\"",
		float64(planned)/mib, info.Name, float64(info.Memory)/mib, largest.Name, float64(largest.Bytes)/mib)
}
