// Tests of nccl.cu with a fake NCCL and a fake CUDA, which log what is enqueued.
// cuda/headers_test.go compiles and runs them.
#define ULY_EMULATED
#include "libraries/nccl.cu"

#include "host_test.h"

#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <vector>

// --- CUDA: one stream
struct CUevent_st {
  size_t at; // its position in the log
};
static std::vector<std::string> enqueued;
static size_t gpu; // the entries of the log that the GPU has reached

cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) { return *e = new CUevent_st, cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return delete e, cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t e) { return e->at < gpu ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) {
  e->at = enqueued.size();
  enqueued.push_back("event");
  return cudaSuccess;
}

// --- the host
static std::atomic<int> sleeps;
extern "C" int nanosleep(const timespec *, timespec *) { return sleeps++, 0; }

int32_t fail(uly_device *d, int32_t code, const char *format, ...) {
  char text[1000];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  d->text = text;
  return code;
}
void launch_group(uly_stream *) {} // no group is open

int32_t check(uly_device *, cudaError_t e, const char *) { return e == cudaSuccess ? ULY_OK : ULY_DEVICE; }

// --- NCCL: one communicator
struct ncclComm {
  int polls = 0; // until a call is enqueued; < 0: never
  int left = 0;  // of the current call
  const char *call = nullptr;
  int aborts = 0;
};
static ncclComm *world;
static std::atomic<int> inside;
static const char *in_group; // the last call of the open group

// Inside checks that one thread at a time is in NCCL.
struct Inside {
  Inside() { CHECK(inside++ == 0, "two threads are in NCCL"); }
  ~Inside() { inside--; }
};

static ncclResult_t progress() {
  if (world->left != 0) return ncclInProgress;
  if (world->call) enqueued.push_back(world->call);
  world->call = nullptr;
  return ncclSuccess;
}
static ncclResult_t launch(const char *call) {
  world->call = call, world->left = world->polls;
  return progress();
}
static ncclResult_t call(const char *name) {
  Inside here;
  return launch(name);
}
static ncclResult_t add(const char *name) {
  Inside here;
  in_group = name;
  return ncclSuccess;
}

static ncclResult_t fake_init(ncclComm_t *c, int, ncclUniqueId, int, ncclConfig_t *config) {
  CHECK(config->blocking == 0, "NCCL permits an abort of non-blocking communicators only");
  *c = world = new ncclComm;
  return ncclSuccess;
}
static ncclResult_t fake_state(ncclComm_t c, ncclResult_t *r) {
  Inside here;
  if (c->left > 0) c->left--;
  *r = progress();
  return ncclSuccess;
}
static ncclResult_t fake_abort(ncclComm_t c) {
  Inside here;
  c->aborts++;
  return ncclSuccess;
}
static ncclResult_t fake_end(ncclComm_t) { return ncclSuccess; }
static ncclResult_t fake_group_start() { return add(nullptr); }
static ncclResult_t fake_group_end() { return call(in_group); }
static ncclResult_t fake_send(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return add("sends");
}
static ncclResult_t fake_receive(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t) { return add("sends"); }
static ncclResult_t fake_all_reduce(const void *, void *, size_t n, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                                    cudaStream_t) {
  return call(n == 5 ? "all-reduce" : "wrong count");
}
static ncclResult_t fake_reduce_scatter(const void *, void *, size_t n, ncclDataType_t t, ncclRedOp_t, ncclComm_t,
                                        cudaStream_t) {
  return call(n == 5 && t == ncclFloat32 ? "reduce-scatter" : "wrong count");
}
static ncclResult_t fake_all_gather(const void *, void *, size_t n, ncclDataType_t, ncclComm_t, cudaStream_t) {
  return call(n == 5 ? "all-gather" : "wrong count");
}
static ncclResult_t fake_broadcast(const void *, void *, size_t n, ncclDataType_t, int, ncclComm_t, cudaStream_t) {
  return call(n == 5 ? "broadcast" : "wrong count");
}
static const char *fake_text(ncclResult_t) { return "an error"; }
static const char *fake_last(ncclComm_t) { return ""; }

library_function::library_function(library, const char *name, bool, void **slot) {
  static const struct {
    const char *name;
    void *f;
  } fakes[] = {
      {"ncclCommInitRankConfig", (void *)fake_init},
      {"ncclCommFinalize", (void *)fake_end},
      {"ncclCommDestroy", (void *)fake_end},
      {"ncclCommAbort", (void *)fake_abort},
      {"ncclCommGetAsyncError", (void *)fake_state},
      {"ncclGroupStart", (void *)fake_group_start},
      {"ncclGroupEnd", (void *)fake_group_end},
      {"ncclSend", (void *)fake_send},
      {"ncclRecv", (void *)fake_receive},
      {"ncclAllReduce", (void *)fake_all_reduce},
      {"ncclAllGather", (void *)fake_all_gather},
      {"ncclReduceScatter", (void *)fake_reduce_scatter},
      {"ncclBroadcast", (void *)fake_broadcast},
      {"ncclGetErrorString", (void *)fake_text},
      {"ncclGetLastError", (void *)fake_last},
  };
  for (const auto &x : fakes)
    if (!strcmp(x.name, name)) *slot = x.f;
}
bool library_open(library) { return true; }
std::string library_reason(library) { return ""; }
std::string library_fix(library) { return ""; }

// --- the tests
static uly_device device;
static uly_stream stream;
static char memory[100];

static uly_nccl *start(const char *timeout) {
  setenv("ULYSSES_TIMEOUT", timeout, 1);
  char id[ULY_NCCL_ID] = {};
  uly_nccl *n = nullptr;
  CHECK(nccl_init(&device, id, 2, 1, &n) == ULY_OK && n);
  return n;
}
static bool says(const std::string &text, const char *words) { return text.find(words) != std::string::npos; }

struct Call {
  const char *enqueues, *name;
  int32_t (*run)(uly_nccl *);
};
static const int64_t offsets[] = {0, 5}, counts[] = {5, 5};
static const Call calls[] = {
    {"sends", "all-to-all",
     [](uly_nccl *n) {
       return nccl_all_to_all(&device, n, &stream, memory, offsets, counts, memory + 50, offsets, counts);
     }},
    {"all-gather", "all-gather",
     [](uly_nccl *n) { return nccl_all_gather(&device, n, &stream, memory, memory + 50, 5); }},
    {"all-reduce", "all-reduce", [](uly_nccl *n) { return nccl_all_reduce(&device, n, &stream, memory, 5, ULY_BF16); }},
    {"reduce-scatter", "reduce-scatter",
     [](uly_nccl *n) { return nccl_reduce_scatter(&device, n, &stream, memory, memory + 50, 5, ULY_F32); }},
    {"broadcast", "broadcast", [](uly_nccl *n) { return nccl_broadcast(&device, n, &stream, memory, 5, 0); }},
    {"sends", "send and receive",
     [](uly_nccl *n) { return nccl_send_recv(&device, n, &stream, memory, 5, 0, memory + 50, 5, 0); }},
};

// A call that NCCL enqueues soon does not put the thread to sleep, and lies between its two events
// when it returns.
static void order() {
  for (int polls : {0, 1, 150}) {
    uly_nccl *n = start("1m");
    world->polls = polls;
    int fewest = 1 << 30; // on a busy machine, calls take longer until one is not interrupted
    for (int i = 0; i < 20 || (fewest > 0 && i < 5000); i++)
      for (const Call &c : calls) {
        enqueued.clear();
        sleeps = 0;
        CHECK(c.run(n) == ULY_OK, "%s: %s", c.name, device.text.c_str());
        const std::vector<std::string> want = {"event", c.enqueues, "event"};
        CHECK(enqueued == want, "%s", c.name);
        fewest = std::min(fewest, sleeps.load());
        gpu = enqueued.size();
      }
    CHECK(fewest == 0, "%d polls: %d sleeps", polls, fewest);
    world->polls = 0;
    CHECK(nccl_close(&device, n) == ULY_OK && world->aborts == 0);
  }
}

// A peer that never joins a call ends it with an error that names the call and this rank.
static void timeout() {
  for (const Call &c : calls) {
    uly_nccl *n = start("20ms");
    world->polls = -1;
    const double before = now();
    CHECK(c.run(n) == ULY_COMM);
    const double waited = now() - before;
    CHECK(waited >= 0.02 && waited < 10, "%s took %g s", c.name, waited);
    CHECK(says(device.text, (std::string(c.name) + ", rank 1 of 2: not all ranks joined within 0.02 s").c_str()), "%s",
          device.text.c_str());
    CHECK(world->aborts == 1);
    CHECK(c.run(n) == ULY_COMM && says(device.text, "aborted") && world->aborts == 1, "%s", device.text.c_str());
    nccl_close(&device, n);
  }
}

// Another thread can abort while a call waits, and does so between two of its polls.
static void abort_of_another_thread() {
  uly_nccl *n = start("0");
  world->polls = -1;
  std::thread other([&] {
    usleep(20000);
    CHECK(nccl_abort(&device, n) == ULY_OK);
  });
  CHECK(calls[0].run(n) == ULY_COMM && says(device.text, "all-to-all, rank 1 of 2: aborted"), "%s",
        device.text.c_str());
  other.join();
  CHECK(world->aborts == 1);
  nccl_close(&device, n);
}

// A kernel that waits for a peer on the GPU is an error after the timeout. Work of this rank that
// precedes it is not.
static void gpu_hangs() {
  uly_nccl *n = start("20ms");
  char text[500] = "";
  gpu = 0;
  enqueued.clear();
  CHECK(calls[3].run(n) == ULY_OK && calls[4].run(n) == ULY_OK);
  for (int i = 0; i < 3; i++) {
    CHECK(nccl_error(&device, n, text, sizeof text) == ULY_OK, "%s", text);
    usleep(30000);
  }
  gpu = 4; // behind the first call, in the second
  CHECK(nccl_error(&device, n, text, sizeof text) == ULY_OK, "%s", text);
  usleep(30000);
  CHECK(nccl_error(&device, n, text, sizeof text) == ULY_COMM);
  CHECK(says(text, "broadcast, rank 1 of 2: this rank's GPU has waited"), "%s", text);
  CHECK(world->aborts == 1);
  nccl_close(&device, n);
}

int main() {
  order();
  timeout();
  abort_of_another_thread();
  gpu_hangs();
  return test_status();
}
