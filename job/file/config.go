package file

import (
	"maps"
	"slices"
	"strings"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/model"
	"ulysses/tensor"
)

// NewConfig returns the configuration of a model from scratch. It has positions for data.sequence
// unless [model.new] says how many.
func (j *Job) NewConfig() (*model.Config, error) {
	fields := maps.Clone(j.Model.New)
	if len(fields) > 0 && fields["max_position_embeddings"] == nil {
		fields["max_position_embeddings"] = max(2048, j.Data.Sequence)
	}
	config, err := model.ConfigFromMap(fields)
	if err == nil {
		config, err = config.Override(j.Model.Override)
	}
	return config, err
}

// ReadConfig returns the configuration of the job's model. It reads no weights.
func (j *Job) ReadConfig() (c *model.Config, err error) {
	if j.Model.Path != "" {
		c, err = model.ReadConfig(j.Model.Path, j.Model.Override)
	} else {
		c, err = j.NewConfig()
	}
	if err = j.ModelFault(err); err == nil {
		err = j.Fit(c)
	}
	return c, err
}

// ComputeType returns the type that device.dtype selects on a device.
func (j *Job) ComputeType(info device.Info) (tensor.DType, error) {
	want, ok := map[string]tensor.DType{"auto": info.Compute[0], "f32": tensor.F32, "bf16": tensor.BF16}[j.Device.DType]
	if !ok || !slices.Contains(info.Compute, want) {
		return tensor.Invalid, j.Errorf(status.Unsupported, "device.dtype", "%q: %s computes in %s; set it to \"auto\"",
			j.Device.DType, info.Kind, DTypeNames(info.Compute))
	}
	return want, nil
}

// DTypeName returns the name of a type in job files.
func DTypeName(d tensor.DType) string { return strings.ToLower(d.String()) }

// DTypeNames returns the names of types, joined by "and".
func DTypeNames(ds []tensor.DType) string {
	var names []string
	for _, d := range ds {
		names = append(names, DTypeName(d))
	}
	return strings.Join(names, " and ")
}
