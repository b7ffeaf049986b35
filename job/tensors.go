package job

import (
	"bytes"
	"cmp"
	"encoding/gob"
	"os"
	"slices"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
	"ulysses/train"
)

// tokenResults gathers the results of the tokens of all ranks on every rank, ordered by set,
// sequence and index. Collective.
func tokenResults(c comm.Comm, own []train.TokenResult) ([]train.TokenResult, error) {
	all, err := gatherTokens(c, own)
	slices.SortFunc(all, func(a, b train.TokenResult) int {
		return cmp.Or(cmp.Compare(a.Set, b.Set), cmp.Compare(a.Sequence, b.Sequence), cmp.Compare(a.Index, b.Index))
	})
	return all, err
}

// checkTensorsFile returns an error if the file of --tensors exists.
func (o *Options) checkTensorsFile() error {
	if o.tensors == "" {
		return nil
	}
	if _, err := os.Lstat(o.tensors); err == nil {
		return status.Errorf(status.IO, "%s: --tensors %s: the file exists; name another file, or remove it", o.verb,
			o.tensors)
	}
	return nil
}

// writeNamed writes tensors to a safetensors file, unless the path is "".
func writeNamed(path string, all []named) error {
	if path == "" {
		return nil
	}
	items := make([]tensor.Item, len(all))
	for i, x := range all {
		t := tensor.OfFloat32(x.data, x.shape...)
		if x.whole {
			ids := make([]int64, len(x.data))
			for j, v := range x.data {
				ids[j] = int64(v)
			}
			t = tensor.OfInt64(ids, x.shape...)
		}
		items[i] = tensor.Item{Name: x.name, Tensor: t}
	}
	return tensor.WriteSafetensors(path, map[string]string{"format": "pt"}, items)
}

// tokenTensors returns the results of the tokens of all ranks, ordered by sequence and index.
// Collective.
func tokenTensors(c comm.Comm, own []train.TokenResult, vocabulary int64) ([]named, error) {
	all, err := tokenResults(c, own)
	if err != nil {
		return nil, err
	}
	column := func(name string, whole bool, of func(*train.TokenResult) float32) named {
		x := named{name: name, shape: []int64{int64(len(all))}, judged: true, whole: whole}
		for i := range all {
			x.data = append(x.data, of(&all[i]))
		}
		return x
	}
	logits := named{name: "logits", shape: []int64{int64(len(all)), vocabulary}, judged: true}
	for i := range all {
		logits.data = append(logits.data, all[i].Logits...)
	}
	return []named{
		column("sequence", true, func(r *train.TokenResult) float32 { return float32(r.Sequence) }),
		column("index", true, func(r *train.TokenResult) float32 { return float32(r.Index) }),
		column("input_ids", true, func(r *train.TokenResult) float32 { return float32(r.ID) }),
		column("targets", true, func(r *train.TokenResult) float32 { return float32(r.Target) }),
		column("token loss", false, func(r *train.TokenResult) float32 { return r.Loss }),
		logits,
	}, nil
}

// gatherTokens returns the results of all ranks on every rank. Collective.
func gatherTokens(c comm.Comm, own []train.TokenResult) (all []train.TokenResult, err error) {
	var mine bytes.Buffer
	if err := gob.NewEncoder(&mine).Encode(own); err != nil {
		return nil, status.Errorf(status.Internal, "results of tokens: %w", err)
	}
	ranks, err := comm.GatherBytes(c, mine.Bytes())
	if err != nil {
		return nil, err
	}
	for rank, text := range ranks {
		var some []train.TokenResult
		if err := gob.NewDecoder(bytes.NewReader(text)).Decode(&some); err != nil {
			return nil, status.Errorf(status.Internal, "results of tokens of rank %d: %w", rank, err)
		}
		all = append(all, some...)
	}
	return all, nil
}
