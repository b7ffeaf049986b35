// What the files of cuDNN's attention share.
#pragma once

#include "kernels/attention.h"
#include "libraries.h"
#include "sdpa_parts.h"
#include "sdpa_shape.h"

// sdpa_tables writes lengths and offsets of documents for cuDNN, from the tables that
// attention_upload has written; empty documents fill up.
int32_t sdpa_tables(uly_device *d, uly_stream *s, const uly_attention &a, const AttentionLayout &tables,
                    const sdpa_shape &shape, char *at);
// sdpa_stats copies the LSE between its own strides and cuDNN's.
int32_t sdpa_stats(uly_device *d, uly_stream *s, const uly_attention &a, const sdpa_shape &shape, float *stats,
                   bool to_stats);

// sdpa_plan builds the plan for a GPU that is not there: `properties` are cuDNN's, as JSON. For
// checks without a GPU. True with the bytes of workspace and the engine's name, else why not.
bool sdpa_plan(const sdpa_shape &shape, const std::string &properties, int sm, int64_t *workspace, std::string *text);
