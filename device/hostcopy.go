package device

import (
	"ulysses/internal/status"
	"ulysses/tensor"
)

// CopyAnywhere is Copy for tensors of which both may be in host memory, also on a device that has
// memory of its own. Such tensors must be dense and of one type; then the call waits for the stream
// and returns after the copy.
func CopyAnywhere(d Device, s Stream, dst, src tensor.Tensor) error {
	if d.Info().Place == tensor.Host || dst.Where != tensor.Host || src.Where != tensor.Host {
		return d.Copy(s, dst, src)
	}
	if dst.DType != src.DType || dst.Numel() != src.Numel() || !dst.Contiguous() || !src.Contiguous() {
		return status.Errorf(status.InvalidArgument,
			"device.CopyAnywhere: %v into %v: tensors in host memory must be dense and of one type and length",
			src, dst)
	}
	if err := s.Sync(); err != nil {
		return err
	}
	copy(dst.RawBytes(), src.RawBytes())
	return nil
}
