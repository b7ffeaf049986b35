// Memory and events of other processes.
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

void processes(const char *self) {
  int to[2], from[2];
  EXPECT(!pipe(to) && !pipe(from), "pipes");
  pid_t child = fork();
  if (child == 0) {
    close(to[1]);
    close(from[0]);
    std::string in = std::to_string(to[0]), out = std::to_string(from[1]);
    setenv("ULYSSES_EMULATED_SEED", "77", 1);
    execl(self, self, "other", in.c_str(), out.c_str(), (char *)nullptr);
    _exit(9);
  }
  close(to[0]);
  close(from[1]);
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
  send(to[1], &letter, sizeof letter);
  EXPECT(receive(from[0], &h, sizeof h), "the other's event");
  FINE(cudaIpcOpenEventHandle(&done, h));

  Stream *a = stream(), *b = stream();
  for (int i = 0; i < 30; i++) {
    FINE(cudaMemsetAsync(x, 0, 4000, a->s));
    LAUNCH(plus, 1, 32, 0, a, x + 999, 3);
    FINE(cudaEventRecord(ready, a->s));
    char go = i == 20 ? 'x' : 'g';
    send(to[1], &go, 1);
    EXPECT(receive(from[0], &go, 1), "the other process");
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
  send(to[1], &freed, 1);
  receive(from[0], &freed, 1);
  close(to[1]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the other process: %d", status);
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
