// The gated delta rule (Yang, Kautz & Hatamizadeh 2024): no kernels are built yet.
#include "plugin.h"

int32_t delta_sizes(uly_device *d, const uly_gated_delta *, uly_delta_sizes *) { return fail(d, ULY_UNSUPPORTED, "cuda.GatedDelta is not built"); }

namespace {

int32_t forward(uly_device *d, uly_stream *, const void *) { return fail(d, ULY_UNSUPPORTED, "cuda.GatedDeltaForward is not built"); }
int32_t backward(uly_device *d, uly_stream *, const void *) { return fail(d, ULY_UNSUPPORTED, "cuda.GatedDeltaBackward is not built"); }
int32_t state(uly_device *d, uly_stream *, const void *) { return fail(d, ULY_UNSUPPORTED, "cuda.DeltaState is not built"); }
int32_t state_grad(uly_device *d, uly_stream *, const void *) { return fail(d, ULY_UNSUPPORTED, "cuda.DeltaStateGrad is not built"); }

} // namespace

const uly_row delta_rows[] = {
    {ULY_OP_GATED_DELTA_FORWARD, "own", forward, nullptr},
    {ULY_OP_GATED_DELTA_BACKWARD, "own", backward, nullptr},
    {ULY_OP_DELTA_STATE, "own", state, nullptr},
    {ULY_OP_DELTA_STATE_GRAD, "own", state_grad, nullptr},
    {0, nullptr, nullptr, nullptr},
};
