package train

import "ulysses/data"

// Rehearse puts the work of an optimizer step of so many micro steps on the device, over as many
// tokens as a micro step may have, one document a row; of an evaluation it is the work of so many
// passes. It is for devices that compute nothing. Collective.
func (t *Trainer) Rehearse(micros int64) error {
	set := t.Train
	if set == nil {
		set = t.Eval
	}
	tokens, _ := t.MaxRows()
	m := &data.MicroBatch{IDs: make([]int32, tokens), Targets: make([]int32, tokens), Positions: make([]int32, tokens), CuSeqlens: []int64{0}, Valid: tokens}
	for at := int64(0); at < tokens; {
		at = min(tokens, at+set.Longest())
		m.CuSeqlens = append(m.CuSeqlens, at)
	}
	if t.Train == nil {
		for range micros {
			if _, err := t.pass(m, 0, false, false); err != nil {
				return err
			}
		}
		return nil
	}
	if err := t.Weights.Begin(t.stream, micros); err != nil {
		return err
	}
	for range micros {
		if _, err := t.pass(m, tokens, true, false); err != nil {
			return err
		}
	}
	norm, err := t.Weights.Reduce(t.stream)
	if err != nil {
		return err
	}
	if err := t.update(&Record{}, norm); err != nil {
		return err
	}
	_, err = t.agree(false)
	return err
}
