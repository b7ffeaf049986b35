package tensor

import "testing"

// TestSliceWithoutElements checks that a view without elements does not point behind the end of the
// tensor's memory, which the garbage collector may find in a free span and stop the program.
func TestSliceWithoutElements(t *testing.T) {
	whole := OfFloat32(make([]float32, 6), 3, 2)
	noRows := Of(whole.Data, F32, 0, 3, 2)
	noRows.Stride = [MaxDims]int64{6, 2, 1}
	for _, view := range []Tensor{whole.Slice(0, 3, 3), whole.Slice(0, 0, 0).Slice(1, 1, 2), noRows.Slice(1, 2, 3)} {
		if view.Numel() != 0 || view.Data != whole.Data {
			t.Errorf("%v begins %d bytes behind its tensor", view, uintptr(view.Data)-uintptr(whole.Data))
		}
	}
	if view := whole.Slice(0, 1, 3); uintptr(view.Data)-uintptr(whole.Data) != 8 {
		t.Errorf("%v begins %d bytes behind its tensor, want 8", view, uintptr(view.Data)-uintptr(whole.Data))
	}
}
