// Memory and events of other processes.
#include <string.h>

#include "emulated_test.h"

struct Letter {
  cudaIpcMemHandle_t memory;
  cudaIpcEventHandle_t ready;
};

static void send(int fd, const void *p, size_t n) { EXPECT(write(fd, p, n) == (ssize_t)n, "a pipe"); }
static bool receive(int fd, void *p, size_t n) {
  for (size_t at = 0; at < n;) {
    ssize_t got = read(fd, (char *)p + at, n - at);
    if (got <= 0) return false;
    at += (size_t)got;
  }
  return true;
}

// The other process: it waits for the event `ready`, multiplies, and records its own event.
int other(int in, int out) {
  Letter letter;
  EXPECT(receive(in, &letter, sizeof letter), "a letter");
  int *x;
  cudaEvent_t ready, done = event(cudaEventDisableTiming | cudaEventInterprocess);
  FINE(cudaIpcOpenMemHandle((void **)&x, letter.memory, cudaIpcMemLazyEnablePeerAccess));
  void *again;
  FINE(cudaIpcOpenMemHandle(&again, letter.memory, cudaIpcMemLazyEnablePeerAccess));
  EXPECT(again == x, "one mapping");
  FINE(cudaIpcCloseMemHandle(again));
  FINE(cudaIpcOpenEventHandle(&ready, letter.ready));
  cudaIpcEventHandle_t h;
  FINE(cudaIpcGetEventHandle(&h, done));
  send(out, &h, sizeof h);
  Stream *s = stream();
  char go;
  while (receive(in, &go, 1)) {
    if (go == 'f') { // run something after x has been freed
      LAUNCH(write_at, 1, 32, 0, s, device<float>(100), 99);
      FINE(cudaStreamSynchronize(s->s));
      send(out, &go, 1);
      continue;
    }
    if (go == 'x') { // write outside of all allocations
      LAUNCH(write_at, 1, 32, 0, s, (float *)x, 1000);
      fails(s, cudaErrorIllegalAddress, {"byte 4000"});
      FINE(cudaStreamDestroy(s->s));
      s = stream();
      go = 'g';
    }
    FINE(cudaStreamWaitEvent(s->s, ready, 0));
    LAUNCH(times, 1, 32, 0, s, x + 999, 5);
    FINE(cudaEventRecord(done, s->s));
    send(out, &go, 1);
  }
  FINE(cudaIpcCloseMemHandle(x));
  return 0;
}

// Pipes connect a process to one that it has started.
struct Pipes {
  pid_t pid;
  int to, from;
  int end() const { // waits for the process and returns its exit status
    close(to);
    int status = 0;
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
};

// start starts this program again, for the other process of a case.
static Pipes start(const char *self, const char *name, int argument = 0) {
  int to[2], from[2];
  EXPECT(!pipe(to) && !pipe(from), "pipes");
  const pid_t pid = fork();
  if (pid == 0) {
    close(to[1]);
    close(from[0]);
    setenv("ULYSSES_EMULATED_SEED", "77", 1);
    execl(self, self, name, std::to_string(to[0]).c_str(), std::to_string(from[1]).c_str(),
          std::to_string(argument).c_str(), (char *)nullptr);
    _exit(9);
  }
  close(to[0]);
  close(from[1]);
  return {pid, to[1], from[0]};
}

void processes(const char *self) {
  const Pipes child = start(self, "other");
  int *x = device<int>(1000);
  Letter letter;
  cudaEvent_t ready = event(cudaEventDisableTiming | cudaEventInterprocess), done, plain = event();
  FINE(cudaIpcGetMemHandle(&letter.memory, x));
  FINE(cudaIpcGetEventHandle(&letter.ready, ready));
  void *own;
  EXPECT(cudaIpcOpenMemHandle(&own, letter.memory, cudaIpcMemLazyEnablePeerAccess) == cudaErrorDeviceUninitialized,
         "its own handle");
  EXPECT(cudaIpcOpenEventHandle(&done, letter.ready) == cudaErrorInvalidResourceHandle, "its own event");
  cudaIpcEventHandle_t h;
  EXPECT(cudaIpcGetEventHandle(&h, plain) == cudaErrorInvalidResourceHandle, "an event that is not interprocess");
  cudaGetLastError();
  send(child.to, &letter, sizeof letter);
  EXPECT(receive(child.from, &h, sizeof h), "the other's event");
  FINE(cudaIpcOpenEventHandle(&done, h));

  Stream *a = stream(), *b = stream();
  for (int i = 0; i < 30; i++) {
    FINE(cudaMemsetAsync(x, 0, 4000, a->s));
    LAUNCH(plus, 1, 32, 0, a, x + 999, 3);
    FINE(cudaEventRecord(ready, a->s));
    char go = i == 20 ? 'x' : 'g';
    send(child.to, &go, 1);
    EXPECT(receive(child.from, &go, 1), "the other process");
    FINE(cudaStreamWaitEvent(b->s, done, 0));
    LAUNCH(plus, 1, 32, 0, b, x + 999, 1);
    int got = read(b, x + 999, 1)[0];
    EXPECT(got == 16, "round %d: %d", i, got);
  }
  EXPECT(cudaEventRecord(ready, b->s) == cudaErrorInvalidValue, "its records are in another stream");
  EXPECT(cudaFree(x) == cudaErrorIllegalAddress, "the other process still maps it");
  std::string text = cudaGetErrorString(cudaErrorIllegalAddress);
  EXPECT(text.find("maps it") != std::string::npos, "%s", text.c_str());
  cudaGetLastError();
  char freed = 'f'; // an error of this process only: no kernel of the other process wrote there
  send(child.to, &freed, 1);
  receive(child.from, &freed, 1);
  EXPECT(child.end() == 0, "the other process");
}

// A process dies while others wait for its event. The others get an error.
void death(const char *self) {
  (void)self;
  int from[2];
  EXPECT(!pipe(from), "pipe");
  pid_t child = fork();
  if (child == 0) {
    // Records an event that never completes: its stream waits for an event of the parent that never
    // completes.
    cudaEvent_t e = event(cudaEventDisableTiming | cudaEventInterprocess);
    cudaIpcEventHandle_t h;
    FINE(cudaIpcGetEventHandle(&h, e));
    send(from[1], &h, sizeof h);
    for (;;) pause();
  }
  cudaIpcEventHandle_t h;
  EXPECT(receive(from[0], &h, sizeof h), "a handle");
  cudaEvent_t e;
  FINE(cudaIpcOpenEventHandle(&e, h));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  Stream *s = stream();
  FINE(cudaStreamWaitEvent(s->s, e, 0)); // never recorded: the wait ends at once
  FINE(cudaStreamSynchronize(s->s));
  // Recorded, and never completed.
  uly_emulated::claim(e);
  FINE(cudaStreamWaitEvent(s->s, e, 0));
  fails(s, cudaErrorLaunchTimeout, {"which has ended"});
}

// Two processes record events ahead of their GPUs: "ready", then, behind a wait for the other's
// "ready", "done", then a wait for the other's "done". The events of each kind are recorded in
// turn. A wait may end only with the newest record, so an event must not be recorded again while
// the other process may wait for it.
static cudaError_t record_ahead(int in, int out, int events) {
  enum { calls = 4 };
  std::vector<cudaEvent_t> own, others(2 * (size_t)events);
  for (cudaEvent_t &e : others) {
    own.push_back(event(cudaEventDisableTiming | cudaEventInterprocess));
    cudaIpcEventHandle_t h;
    FINE(cudaIpcGetEventHandle(&h, own.back()));
    send(out, &h, sizeof h);
    EXPECT(receive(in, &h, sizeof h), "a handle");
    FINE(cudaIpcOpenEventHandle(&e, h));
  }
  Stream *s = stream();
  for (int i = 0; i < 2 * calls; i++) {
    const size_t at = 2 * (size_t)(i / 2 % events) + (size_t)(i % 2);
    char go = 0;
    FINE(cudaEventRecord(own[at], s->s));
    send(out, &go, 1);
    EXPECT(receive(in, &go, 1), "the other process");
    FINE(cudaStreamWaitEvent(s->s, others[at], 0));
  }
  const cudaError_t e = cudaStreamSynchronize(s->s);
  char go = 0;
  send(out, &go, 1);
  receive(in, &go, 1);
  return e;
}

int late_other(int in, int out, int events) {
  record_ahead(in, out, events);
  return 0;
}

void late(const char *self) {
  setenv("ULYSSES_EMULATED_LATE", "2000", 1);
  setenv("ULYSSES_EMULATED_TIMEOUT", "1", 1);
  for (int events : {1, 2, 4}) {
    const Pipes child = start(self, "late_other", events);
    const cudaError_t e = record_ahead(child.from, child.to, events);
    EXPECT((e == cudaSuccess) == (events == 4), "%d events: %s", events, cudaGetErrorName(e));
    cudaGetLastError();
    EXPECT(child.end() == 0, "the other process");
  }
}

// Memory is freed while another process maps it. New memory then has the same handle; the other
// process sees it only after it has closed its map.
int reuse_other(int in, int out) {
  cudaIpcMemHandle_t h;
  int *x = nullptr;
  Stream *s = stream();
  while (receive(in, &h, sizeof h)) {
    int *same;
    FINE(cudaIpcOpenMemHandle((void **)&same, h, cudaIpcMemLazyEnablePeerAccess));
    EXPECT(!x || same == x, "an open handle has one map");
    const int stale = read(s, same, 1)[0];
    if (x) {
      FINE(cudaIpcCloseMemHandle(same));
      FINE(cudaIpcCloseMemHandle(x));
      FINE(cudaIpcOpenMemHandle((void **)&same, h, cudaIpcMemLazyEnablePeerAccess));
    }
    x = same;
    const int seen[2] = {stale, read(s, x, 1)[0]};
    send(out, seen, sizeof seen);
  }
  return 0;
}

void reuse(const char *self) {
  setenv("ULYSSES_EMULATED_REUSE", "1", 1);
  const Pipes child = start(self, "reuse_other");
  Stream *s = stream();
  cudaIpcMemHandle_t first, h;
  for (int i = 0; i < 4; i++) {
    int *x = device<int>(1000), seen[2];
    FINE(cudaMemcpyAsync(x, &i, 4, cudaMemcpyHostToDevice, s->s));
    FINE(cudaStreamSynchronize(s->s));
    FINE(cudaIpcGetMemHandle(&h, x));
    if (i == 0) first = h;
    EXPECT(!memcmp(&h, &first, sizeof h), "one handle");
    send(child.to, &h, sizeof h);
    EXPECT(receive(child.from, seen, sizeof seen), "the other process");
    EXPECT(seen[0] == (i ? i - 1 : 0) && seen[1] == i, "round %d: %d, then %d", i, seen[0], seen[1]);
    FINE(cudaFree(x));
  }
  EXPECT(child.end() == 0, "the other process");
}
