// Attention on tensor cores, in BF16 with F32 sums: the algorithms of attention_forward.cu and
// attention_backward.cu. Probabilities and score gradients are rounded to BF16 before they are
// multiplied.
//
// The forward pass, and the backward pass of reproducible calls, add in a fixed order: no block
// adds to another block's results. Reproducible gradients need two kernels, which compute the
// scores and dP twice: seven products. Otherwise the dk and dv kernel also adds to dq, in the order
// in which blocks finish: five products.
//
// SCORED: scores are capped, biased, dropped or hidden by a block mask (attention_scored.h). They
// are then in natural units from the cap on, and tiles that the block mask hides are neither copied
// nor computed. The kernels are in attention_mma.cu and attention_mma_scored.cu.
#pragma once

#include "attention_mma_backward.h"
#include "attention_mma_forward.h"
