// Declarations that the sources of cuDNN's attention share.
#pragma once

#include "kernels/attention.h"
#include "libraries.h"
#include "sdpa_split.h"
#include "sdpa_shape.h"

// sdpa_tables writes the lengths and offsets of documents for cuDNN at `at`, from the tables that
// attention_upload has written. Empty documents fill the rest of the tables.
int32_t sdpa_tables(uly_device *d, uly_stream *s, const uly_attention &a, const AttentionLayout &tables,
                    const sdpa_shape &shape, char *at);
// sdpa_stats copies the LSE between the strides of a.lse and cuDNN's.
int32_t sdpa_stats(uly_device *d, uly_stream *s, const uly_attention &a, const sdpa_shape &shape, float *stats,
                   bool to_stats);

// sdpa_plan builds the plan of a call for an absent GPU, for tests. `properties` describes the GPU
// in cuDNN's JSON format. It returns true, the bytes of workspace and the name of the engine in
// *text; or false and the reason in *text.
bool sdpa_plan(const sdpa_shape &shape, const std::string &properties, int sm, int64_t *workspace, std::string *text);
