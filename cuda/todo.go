package cuda

import (
	"ulysses/device"
	"ulysses/internal/status"
)

// Not built yet.

func (d *Device) GatedDeltaSizes(*device.GatedDelta) device.DeltaSizes { return device.DeltaSizes{} }
func (d *Device) GatedDeltaForward(device.Stream, *device.GatedDelta) error {
	return status.Errorf(status.Unsupported, "cuda.GatedDeltaForward is not built")
}
func (d *Device) GatedDeltaBackward(device.Stream, *device.GatedDeltaGrad) error {
	return status.Errorf(status.Unsupported, "cuda.GatedDeltaBackward is not built")
}
func (d *Device) DeltaState(device.Stream, *device.DeltaState) error {
	return status.Errorf(status.Unsupported, "cuda.DeltaState is not built")
}
func (d *Device) DeltaStateGrad(device.Stream, *device.DeltaStateGrad) error {
	return status.Errorf(status.Unsupported, "cuda.DeltaStateGrad is not built")
}
func (d *Device) DeltaFold(device.Stream, *device.DeltaFold) error {
	return status.Errorf(status.Unsupported, "cuda.DeltaFold is not built")
}
func (d *Device) DeltaGatesForward(device.Stream, *device.DeltaGates) error {
	return status.Errorf(status.Unsupported, "cuda.DeltaGatesForward is not built")
}
func (d *Device) DeltaGatesBackward(device.Stream, *device.DeltaGatesGrad) error {
	return status.Errorf(status.Unsupported, "cuda.DeltaGatesBackward is not built")
}
func (d *Device) Conv1dForward(device.Stream, *device.Conv1d) error {
	return status.Errorf(status.Unsupported, "cuda.Conv1dForward is not built")
}
func (d *Device) Conv1dBackward(device.Stream, *device.Conv1dGrad) error {
	return status.Errorf(status.Unsupported, "cuda.Conv1dBackward is not built")
}
func (d *Device) GatedRMSNormForward(device.Stream, *device.GatedRMSNorm) error {
	return status.Errorf(status.Unsupported, "cuda.GatedRMSNormForward is not built")
}
func (d *Device) GatedRMSNormBackward(device.Stream, *device.GatedRMSNormGrad) error {
	return status.Errorf(status.Unsupported, "cuda.GatedRMSNormBackward is not built")
}
func (d *Device) SigmoidGateForward(device.Stream, *device.SigmoidGate) error {
	return status.Errorf(status.Unsupported, "cuda.SigmoidGateForward is not built")
}
func (d *Device) SigmoidGateBackward(device.Stream, *device.SigmoidGateGrad) error {
	return status.Errorf(status.Unsupported, "cuda.SigmoidGateBackward is not built")
}
