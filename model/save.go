package model

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// companions are the files beside the weights that Save copies from the source: what a user needs to talk to the model.
var companions = []string{"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
	"vocab.json", "merges.txt", "generation_config.json", "chat_template.jinja", "chat_template.json"}

// Save writes the parameters, which whole gives group by group, flat, as a Hugging Face folder that transformers loads: the source's names and element types (F32 for a
// model from scratch), tied tensors once, and the tokenizer's files of source, a folder or "". The folder appears whole or not at all;
// the model in one that was there is replaced, other files in it stay. One rank calls it.
func (m *Model) Save(dir, source string, whole func(group int) (tensor.Tensor, error)) (err error) {
	dir = filepath.Clean(dir)
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return status.Errorf(status.IO, "model.Save: %w: choose an output folder that can be written", err)
	}
	temp, err := os.MkdirTemp(filepath.Dir(dir), "."+filepath.Base(dir)+".*")
	if err != nil {
		return status.Errorf(status.IO, "model.Save: %w: choose an output folder that can be written", err)
	}
	defer os.RemoveAll(temp) // nothing is left of it after the rename
	if err := os.Chmod(temp, 0o755); err != nil {
		return status.Errorf(status.IO, "model.Save: %w", err)
	}
	text, err := json.MarshalIndent(m.Config.fields(), "", "  ")
	if err != nil {
		return status.Errorf(status.Internal, "model.Save: config.json: %w", err)
	}
	err = tensor.WriteFile(filepath.Join(temp, configFile), func(w io.Writer) error {
		_, err := w.Write(append(text, '\n'))
		return err
	})
	if err != nil {
		return err
	}
	if err := m.saveWeights(filepath.Join(temp, weightsFile), whole); err != nil {
		return err
	}
	if source != "" {
		for _, name := range companions {
			if err := copyFile(filepath.Join(temp, name), filepath.Join(source, name)); err != nil {
				return err
			}
		}
	}
	return replace(dir, temp)
}

// replace puts temp in the place of dir. Files of dir that are none of the model's move along.
func replace(dir, temp string) error {
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		return status.Errorf(status.IO, "model.Save: %s is a file: move it away or choose another folder", dir)
	}
	old := temp + ".old"
	err := os.Rename(dir, old)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return status.Errorf(status.IO, "model.Save: %s cannot be replaced: %w", dir, err)
	}
	if err := os.Rename(temp, dir); err != nil {
		os.Rename(old, dir) // as it was
		return status.Errorf(status.IO, "model.Save: %s cannot be written: %w", dir, err)
	}
	entries, _ := os.ReadDir(old) // none when there was no folder
	for _, e := range entries {
		name := e.Name()
		if name == configFile || slices.Contains(companions, name) || strings.Contains(name, ".safetensors") || strings.HasSuffix(name, ".bin") {
			continue
		}
		if err := os.Rename(filepath.Join(old, name), filepath.Join(dir, name)); err != nil {
			return status.Errorf(status.IO, "model.Save: %s is saved, but %s stays in %s: %w", dir, name, old, err)
		}
	}
	if err := os.RemoveAll(old); err != nil {
		return status.Errorf(status.IO, "model.Save: the former %s stays as %s: %w", dir, old, err)
	}
	return nil
}

func copyFile(dst, src string) error {
	r, err := os.Open(src)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return status.Errorf(status.IO, "model.Save: %w", err)
	}
	defer r.Close()
	return tensor.WriteFile(dst, func(w io.Writer) error { _, err := io.Copy(w, r); return err })
}

func (m *Model) saveWeights(path string, whole func(group int) (tensor.Tensor, error)) error {
	s, err := m.dev.NewStream()
	if err != nil {
		return err
	}
	defer s.Close()
	piece := make([]float32, 1<<16)
	bytes := make([]byte, 0, 8*len(piece))
	var items []tensor.Item
	for i, g := range m.groups {
		var flat tensor.Tensor
		at := int64(0)
		for j, p := range g.Params {
			lo := at
			items = append(items, tensor.Item{Name: p.Name, Tensor: tensor.Of(nil, p.stored, p.Shape...), Write: func(w io.Writer) (err error) {
				if j == 0 {
					if flat, err = whole(i); err != nil {
						return err
					}
				}
				return m.writeParam(s, w, p, flat.Slice(0, lo, lo+p.Numel()), piece, bytes)
			}})
			at += p.Numel()
		}
	}
	return tensor.WriteSafetensors(path, map[string]string{"format": "pt"}, items)
}

func (m *Model) writeParam(s device.Stream, w io.Writer, p *Param, flat tensor.Tensor, piece []float32, bytes []byte) error {
	n := p.Numel()
	for at := int64(0); at < n; at += int64(len(piece)) {
		src := piece[:min(int64(len(piece)), n-at)]
		if err := m.dev.Copy(s, tensor.OfFloat32(src, int64(len(src))), flat.Slice(0, at, at+int64(len(src)))); err != nil {
			return err
		}
		if err := s.Sync(); err != nil {
			return err
		}
		bytes = bytes[:0]
		for i, v := range src {
			switch p.stored {
			case tensor.BF16:
				bytes = binary.LittleEndian.AppendUint16(bytes, tensor.F32ToBF16(v))
			case tensor.F16:
				h := f32ToF16(v)
				if h&0x7fff == 0x7c00 && !math.IsInf(float64(v), 0) {
					return fmt.Errorf("%v at %v is too large for F16: set override dtype = \"float32\"", v, place(at+int64(i), p.Shape))
				}
				bytes = binary.LittleEndian.AppendUint16(bytes, h)
			case tensor.F64:
				bytes = binary.LittleEndian.AppendUint64(bytes, math.Float64bits(float64(v)))
			default:
				bytes = binary.LittleEndian.AppendUint32(bytes, math.Float32bits(v))
			}
		}
		if _, err := w.Write(bytes); err != nil {
			return err
		}
	}
	return nil
}

// f32ToF16 rounds to nearest even, to infinity above 65504 and a half step.
func f32ToF16(f float32) uint16 {
	u := math.Float32bits(f)
	sign, a := uint16(u>>16)&0x8000, u&0x7fffffff
	switch {
	case a > 0x7f800000:
		return sign | 0x7e00
	case a >= 0x47800000: // 2^16
		return sign | 0x7c00
	case a < 0x38800000: // below 2^-14: a multiple of 2^-24
		return sign | uint16(math.RoundToEven(float64(math.Float32frombits(a))*(1<<24)))
	}
	return sign | uint16((a-0x38000000+0xfff+a>>13&1)>>13)
}

// fields is what config.json says: the source's fields, or all of them for a model from scratch.
func (c *Config) fields() map[string]any {
	f := map[string]any{}
	if c.raw != nil {
		f = pointed(c.raw).(map[string]any)
	}
	put := func(name string, value any) {
		if f[name] == nil {
			f[name] = value
		}
	}
	put("architectures", []string{architectures[c.ModelType]})
	put("hidden_act", "silu")
	put("num_key_value_heads", c.NumKeyValueHeads)
	put("head_dim", c.HeadDim)
	put("max_position_embeddings", c.MaxPositionEmbeddings)
	put("rms_norm_eps", pointed(c.RMSNormEps))
	put("initializer_range", pointed(c.InitializerRange))
	put("tie_word_embeddings", c.TieWordEmbeddings)
	if _, nested := f["rope_parameters"]; !nested { // where transformers 5 keeps it; it reads the older fields too
		put("rope_theta", pointed(c.Rope.Theta))
		if c.hybrid() {
			put("partial_rotary_factor", pointed(float64(c.RotaryDim)/float64(c.HeadDim)))
		}
	}
	if c.hybrid() {
		c.Hybrid.put(put)
	}
	if c.ModelType != "qwen2" {
		put("attention_bias", c.AttentionBias)
	}
	if f["dtype"] == nil && f["torch_dtype"] == nil {
		f["torch_dtype"] = "float32"
	}
	return f
}

// pointed writes whole numbers of floating type with a point, as in 8.0: transformers looks at the type of some.
func pointed(v any) any {
	switch v := v.(type) {
	case float64:
		text := strconv.FormatFloat(v, 'g', -1, 64)
		if !strings.ContainsAny(text, ".eE") {
			text += ".0"
		}
		return json.Number(text)
	case map[string]any:
		m := make(map[string]any, len(v))
		for name, x := range v {
			m[name] = pointed(x)
		}
		return m
	}
	return v
}
