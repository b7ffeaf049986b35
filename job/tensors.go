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

// checkTensorsFile returns an error on rank 0, which writes the file of --tensors, if the file
// exists or its folder cannot be written. Otherwise the evaluation would be lost.
func (o *Options) checkTensorsFile(rank int) error {
	if o.tensors == "" || rank > 0 {
		return nil
	}
	if _, err := os.Lstat(o.tensors); err == nil {
		return status.Errorf(status.IO, "%s: --tensors %s: the file exists; name another file, or remove it", o.verb,
			o.tensors)
	}
	temp, err := tensor.Beside(o.tensors, func(name string) error { return os.Mkdir(name, 0o777) })
	if err != nil {
		return status.Errorf(status.IO, "%s: --tensors %s: its folder cannot be written: %w; name another file",
			o.verb, o.tensors, err)
	}
	tensor.Discard(temp)
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

// tokensOfRank are the results of a rank without their logits, which are gathered as they are: a
// text of them would be more than twice as large.
type tokensOfRank struct {
	Tokens     []train.TokenResult
	Vocabulary int64 // logits of a token; 0 = there are none
}

// gatherTokens returns the results of all ranks on every rank. It takes the logits out of own.
// Collective.
func gatherTokens(c comm.Comm, own []train.TokenResult) (all []train.TokenResult, err error) {
	mine := tokensOfRank{Tokens: slices.Clone(own)}
	if len(own) > 0 {
		mine.Vocabulary = int64(len(own[0].Logits))
	}
	logits := make([]float32, 0, int64(len(own))*mine.Vocabulary)
	for i := range own {
		logits = append(logits, own[i].Logits...)
		own[i].Logits, mine.Tokens[i].Logits = nil, nil
	}
	var text bytes.Buffer
	if err := gob.NewEncoder(&text).Encode(mine); err != nil {
		return nil, status.Errorf(status.Internal, "results of tokens: %w", err)
	}
	ranks, err := comm.GatherBytes(c, text.Bytes())
	if err != nil {
		return nil, err
	}
	vocabulary, rows := int64(0), make([]int64, len(ranks))
	for rank, text := range ranks {
		var x tokensOfRank
		if err := gob.NewDecoder(bytes.NewReader(text)).Decode(&x); err != nil {
			return nil, status.Errorf(status.Internal, "results of tokens of rank %d: %w", rank, err)
		}
		all, rows[rank], vocabulary = append(all, x.Tokens...), int64(len(x.Tokens)), max(vocabulary, x.Vocabulary)
	}
	if vocabulary == 0 {
		return all, nil
	}
	for rank := range rows {
		rows[rank] *= vocabulary
	}
	whole := make([]float32, int64(len(all))*vocabulary)
	err = c.AllGather(nil, tensor.OfFloat32(whole, int64(len(whole))),
		tensor.OfFloat32(logits, int64(len(logits))), rows)
	for i := range all {
		all[i].Logits, whole = whole[:vocabulary:vocabulary], whole[vocabulary:]
	}
	return all, err
}
