// C functions that Go calls. cgo can call functions but not function pointers, so each function of
// the plug-in's table has a wrapper here.
#ifndef ULYSSES_CUDA_BRIDGE_H
#define ULYSSES_CUDA_BRIDGE_H

#include "kernels.h"

// plug_load opens a plug-in and returns its table. It returns NULL on failure: with a message of
// the loader in text; with have = 0 and no message if the file is not a plug-in; or with the
// plug-in's ABI version in have if that differs from ULY_CUDA_ABI.
const uly_cuda_api *plug_load(const char *path, char *text, int64_t text_bytes, uint32_t *have);

static inline int32_t plug_probe(const uly_cuda_api *t, uly_probe *out) { return t->probe(out); }
static inline int32_t plug_open(const uly_cuda_api *t, const uly_open *how, uly_device **out, char *text,
                                int64_t text_bytes) {
  return t->open(how, out, text, text_bytes);
}
static inline void plug_close(const uly_cuda_api *t, uly_device *d) { t->close(d); }
static inline const char *plug_error(const uly_cuda_api *t, uly_device *d) { return t->error(d); }
static inline int32_t plug_info(const uly_cuda_api *t, uly_device *d, uly_info *out) { return t->info(d, out); }

static inline int32_t plug_alloc(const uly_cuda_api *t, uly_device *d, int64_t bytes, void **out) {
  return t->alloc(d, bytes, out);
}
static inline int32_t plug_free(const uly_cuda_api *t, uly_device *d, void *p) { return t->free(d, p); }
static inline int32_t plug_alloc_host(const uly_cuda_api *t, uly_device *d, int64_t bytes, void **out) {
  return t->alloc_host(d, bytes, out);
}
static inline int32_t plug_free_host(const uly_cuda_api *t, uly_device *d, void *p) { return t->free_host(d, p); }

static inline int32_t plug_stream_create(const uly_cuda_api *t, uly_device *d, int32_t use, uly_stream **out) {
  return t->stream_create(d, use, out);
}
static inline int32_t plug_stream_destroy(const uly_cuda_api *t, uly_device *d, uly_stream *s) {
  return t->stream_destroy(d, s);
}
static inline int32_t plug_stream_sync(const uly_cuda_api *t, uly_device *d, uly_stream *s) {
  return t->stream_sync(d, s);
}
static inline int32_t plug_stream_query(const uly_cuda_api *t, uly_device *d, uly_stream *s, int32_t *done) {
  return t->stream_query(d, s, done);
}
static inline int32_t plug_stream_group(const uly_cuda_api *t, uly_device *d, uly_stream *s, int32_t open) {
  return t->stream_group(d, s, open);
}
static inline int32_t plug_stream_wait(const uly_cuda_api *t, uly_device *d, uly_stream *s, uly_event *e) {
  return t->stream_wait(d, s, e);
}
static inline int32_t plug_event_create(const uly_cuda_api *t, uly_device *d, int32_t shared, uly_event **out) {
  return t->event_create(d, shared, out);
}
static inline int32_t plug_event_destroy(const uly_cuda_api *t, uly_device *d, uly_event *e) {
  return t->event_destroy(d, e);
}
static inline int32_t plug_event_record(const uly_cuda_api *t, uly_device *d, uly_event *e, uly_stream *s) {
  return t->event_record(d, e, s);
}
static inline int32_t plug_event_sync(const uly_cuda_api *t, uly_device *d, uly_event *e) {
  return t->event_sync(d, e);
}
static inline int32_t plug_event_query(const uly_cuda_api *t, uly_device *d, uly_event *e, int32_t *done) {
  return t->event_query(d, e, done);
}

static inline int32_t plug_enqueue(const uly_cuda_api *t, uly_device *d, uly_stream *s, int32_t op, const void *args,
                                   int64_t bytes) {
  return t->enqueue(d, s, op, args, bytes);
}
static inline int32_t plug_workspace(const uly_cuda_api *t, uly_device *d, const uly_attention *a, int32_t backward,
                                     int64_t *bytes) {
  return t->workspace(d, a, backward, bytes);
}
static inline int32_t plug_delta_sizes(const uly_cuda_api *t, uly_device *d, const uly_gated_delta *a,
                                       uly_delta_sizes *out) {
  return t->delta_sizes(d, a, out);
}
static inline int32_t plug_kernel_of(const uly_cuda_api *t, uly_device *d, int32_t op, const void *args,
                                     const char **row) {
  return t->kernel_of(d, op, args, row);
}

static inline int32_t plug_memory_handle(const uly_cuda_api *t, uly_device *d, const void *p, char *handle,
                                         int64_t *offset, uint64_t *generation) {
  return t->memory_handle(d, p, handle, offset, generation);
}
static inline int32_t plug_memory_open(const uly_cuda_api *t, uly_device *d, const char *handle, void **out) {
  return t->memory_open(d, handle, out);
}
static inline int32_t plug_memory_close(const uly_cuda_api *t, uly_device *d, void *p) { return t->memory_close(d, p); }
static inline int32_t plug_event_handle(const uly_cuda_api *t, uly_device *d, uly_event *e, char *handle) {
  return t->event_handle(d, e, handle);
}
static inline int32_t plug_event_open(const uly_cuda_api *t, uly_device *d, const char *handle, uly_event **out) {
  return t->event_open(d, handle, out);
}
static inline int32_t plug_copy_bytes(const uly_cuda_api *t, uly_device *d, uly_stream *s, void *dst, const void *src,
                                      int64_t bytes) {
  return t->copy_bytes(d, s, dst, src, bytes);
}

static inline int32_t plug_peer_access(const uly_cuda_api *t, uly_device *d, int32_t ordinal, int32_t *can) {
  return t->peer_access(d, ordinal, can);
}

static inline int32_t plug_nccl_ordered(const uly_cuda_api *t, uly_device *d, int32_t *ordered) {
  return t->nccl_ordered(d, ordered);
}
static inline int32_t plug_nccl_id(const uly_cuda_api *t, uly_device *d, char *id) { return t->nccl_id(d, id); }
static inline int32_t plug_nccl_init(const uly_cuda_api *t, uly_device *d, const char *id, int32_t ranks, int32_t rank,
                                     uly_nccl **out) {
  return t->nccl_init(d, id, ranks, rank, out);
}
static inline int32_t plug_nccl_close(const uly_cuda_api *t, uly_device *d, uly_nccl *n) { return t->nccl_close(d, n); }
static inline int32_t plug_nccl_abort(const uly_cuda_api *t, uly_device *d, uly_nccl *n) { return t->nccl_abort(d, n); }
static inline int32_t plug_nccl_error(const uly_cuda_api *t, uly_device *d, uly_nccl *n, char *text,
                                      int64_t text_bytes) {
  return t->nccl_error(d, n, text, text_bytes);
}
static inline int32_t plug_nccl_all_to_all(const uly_cuda_api *t, uly_device *d, uly_nccl *n, uly_stream *s, void *dst,
                                           const int64_t *recv_at, const int64_t *recv_bytes, const void *src,
                                           const int64_t *send_at, const int64_t *send_bytes) {
  return t->nccl_all_to_all(d, n, s, dst, recv_at, recv_bytes, src, send_at, send_bytes);
}
static inline int32_t plug_nccl_all_gather(const uly_cuda_api *t, uly_device *d, uly_nccl *n, uly_stream *s, void *dst,
                                           const void *src, int64_t bytes) {
  return t->nccl_all_gather(d, n, s, dst, src, bytes);
}
static inline int32_t plug_nccl_all_reduce(const uly_cuda_api *t, uly_device *d, uly_nccl *n, uly_stream *s, void *x,
                                           int64_t count, int32_t dtype) {
  return t->nccl_all_reduce(d, n, s, x, count, dtype);
}
static inline int32_t plug_nccl_reduce_scatter(const uly_cuda_api *t, uly_device *d, uly_nccl *n, uly_stream *s,
                                               void *dst, const void *src, int64_t count, int32_t dtype) {
  return t->nccl_reduce_scatter(d, n, s, dst, src, count, dtype);
}
static inline int32_t plug_nccl_broadcast(const uly_cuda_api *t, uly_device *d, uly_nccl *n, uly_stream *s, void *x,
                                          int64_t bytes, int32_t root) {
  return t->nccl_broadcast(d, n, s, x, bytes, root);
}
static inline int32_t plug_nccl_send_recv(const uly_cuda_api *t, uly_device *d, uly_nccl *n, uly_stream *s, void *recv,
                                          int64_t recv_bytes, int32_t from, const void *send, int64_t send_bytes,
                                          int32_t to) {
  return t->nccl_send_recv(d, n, s, recv, recv_bytes, from, send, send_bytes, to);
}

static inline int32_t plug_stream_wrap(const uly_cuda_api *t, uly_device *d, uintptr_t external, uly_stream **s) {
  return t->stream_wrap(d, (void *)external, s);
}
static inline int32_t plug_memory_kind(const uly_cuda_api *t, uly_device *d, uintptr_t p, int32_t *kind,
                                       int32_t *ordinal) {
  return t->memory_kind(d, (const void *)p, kind, ordinal);
}
static inline uintptr_t plug_thread_save(const uly_cuda_api *t) { return (uintptr_t)t->thread_save(); }
static inline void plug_thread_restore(const uly_cuda_api *t, uintptr_t was) { t->thread_restore((void *)was); }

#endif
