// The declarations of NVIDIA's nccl.h that nccl.cu uses, for nccl_test.cpp, which defines the
// functions.
#pragma once

#include <stddef.h>

typedef struct ncclComm *ncclComm_t;
typedef struct {
  char internal[128];
} ncclUniqueId;
typedef enum {
  ncclSuccess,
  ncclUnhandledCudaError,
  ncclSystemError,
  ncclInternalError,
  ncclInProgress = 7
} ncclResult_t;
typedef enum { ncclInt8, ncclInt32, ncclInt64, ncclFloat32, ncclFloat64, ncclBfloat16 } ncclDataType_t;
typedef enum { ncclSum } ncclRedOp_t;
typedef struct {
  int blocking;
} ncclConfig_t;
#define NCCL_CONFIG_INITIALIZER {1}
