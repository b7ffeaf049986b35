package cpu

import (
	"ulysses/device"
	"ulysses/internal/status"
)

// Not built yet.

func (d *Device) DeltaGatesForward(device.Stream, *device.DeltaGates) error {
	return status.Errorf(status.Unsupported, "cpu.DeltaGatesForward is not built")
}
func (d *Device) DeltaGatesBackward(device.Stream, *device.DeltaGatesGrad) error {
	return status.Errorf(status.Unsupported, "cpu.DeltaGatesBackward is not built")
}
func (d *Device) Conv1dForward(device.Stream, *device.Conv1d) error {
	return status.Errorf(status.Unsupported, "cpu.Conv1dForward is not built")
}
func (d *Device) Conv1dBackward(device.Stream, *device.Conv1dGrad) error {
	return status.Errorf(status.Unsupported, "cpu.Conv1dBackward is not built")
}
func (d *Device) GatedRMSNormForward(device.Stream, *device.GatedRMSNorm) error {
	return status.Errorf(status.Unsupported, "cpu.GatedRMSNormForward is not built")
}
func (d *Device) GatedRMSNormBackward(device.Stream, *device.GatedRMSNormGrad) error {
	return status.Errorf(status.Unsupported, "cpu.GatedRMSNormBackward is not built")
}
func (d *Device) SigmoidGateForward(device.Stream, *device.SigmoidGate) error {
	return status.Errorf(status.Unsupported, "cpu.SigmoidGateForward is not built")
}
func (d *Device) SigmoidGateBackward(device.Stream, *device.SigmoidGateGrad) error {
	return status.Errorf(status.Unsupported, "cpu.SigmoidGateBackward is not built")
}
