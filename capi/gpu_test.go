package main

import (
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"ulysses/cuda"
	"ulysses/internal/status"
	"ulysses/testkit/cudatest"
	"ulysses/testkit/need"
)

// gpuHost returns the environment of a host with tensors on a GPU: the plug-in, and the CUDA
// runtime of the host. The emulated plug-in also has the functions of a CUDA runtime.
func gpuHost(t *testing.T) []string {
	t.Helper()
	env := []string{"ULYSSES_CUDA_PLUGIN=" + cudatest.Use(t)}
	if os.Getenv("ULYSSES_TEST_CUDART") == "" && strings.Contains(env[0], "emulated") {
		env = append(env, "ULYSSES_TEST_CUDART="+cudatest.Use(t))
	}
	return env
}

// Results on a GPU are close to the results of the CPU, and bitwise equal on one rank and on
// several. Calls run in the order of the host's stream and do not wait for it.
func TestHostOnGPU(t *testing.T) {
	env := gpuHost(t)
	exe := compile(t, "gcc", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-pedantic", "-Werror", "testdata/gpu.c",
		"-lpthread", "-ldl")
	for _, seed := range []string{"1", "2", "3"} {
		for _, mode := range []string{"alone", "hostile", "threads"} {
			t.Run(mode+" "+seed, func(t *testing.T) {
				out := output(t, 2*time.Minute,
					append(env, "ULYSSES_EMULATED_DEVICES=2", "ULYSSES_EMULATED_SEED="+seed), exe, mode)
				if !strings.Contains(out, "ok "+mode) || mode == "hostile" && len(env) > 1 &&
					!strings.Contains(out, "two GPUs") {
					t.Error(out)
				}
			})
		}
	}
}

func TestHostOnGPUWithMPI(t *testing.T) {
	for _, variable := range gpuHost(t) {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
	exe := compile(t, "mpicc", "-DWITH_MPI", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror",
		"testdata/gpu.c", "-lpthread", "-ldl")
	for _, n := range []int{1, 2, 3, 4} {
		if out := mpirun(t, n, exe); !strings.Contains(out, "ok gpu") {
			t.Errorf("%d ranks: %s", n, out)
		}
	}
}

// moveToGPU gives the tensors, the saved memory and the workspace of a host memory of a GPU, and
// returns a context, a plan and a batch there.
func moveToGPU(t *testing.T, h *host) (ctx, plan, batch uintptr) {
	t.Helper()
	o := cOptions{struct_size: uint32(unsafe.Sizeof(cOptions{})), device: onCUDA}
	must(t, newLocal(p(&o), p(&ctx)))
	t.Cleanup(func() { contextDestroy(ctx) })
	must(t, newPlan(ctx, p(&h.desc), p(&plan)))
	must(t, newBatch(ctx, p(&h.lengths), p(&batch)))
	must(t, planSizes(plan, batch, p(&h.sizes)))
	c, err := find[context]("test", contextKind, ctx)
	must(t, err)
	allocate := func(n uint64) unsafe.Pointer {
		b, err := c.dev.Alloc(int64(n))
		must(t, err)
		t.Cleanup(b.Free)
		return b.Pointer()
	}
	for i := range h.t {
		h.t[i].data, h.t[i].device = allocate(uint64(len(h.data[i]))*4), onCUDA
	}
	h.args.saved, h.args.saved_bytes, h.args.workspace, h.args.workspace_bytes = allocate(h.sizes.saved), h.sizes.saved,
		allocate(h.sizes.workspace), h.sizes.workspace
	return ctx, plan, batch
}

// On a GPU, a backward pass refuses a seed that no recent forward pass had. Seeds of several passes
// in flight are valid.
func TestDropoutSeedOnGPU(t *testing.T) {
	cudatest.Use(t)
	h := newHostOf(t, 1, 6, 2, 1, 4, flagCausal, func(d *cAttentionDesc) { d.dropout = 0.5 })
	_, plan, batch := moveToGPU(t, h)
	for seed := range uint64(3) {
		h.args.dropout_seed = seed
		must(t, attentionForward(plan, batch, p(&h.args)))
	}
	h.args.dropout_seed = 3
	err := attentionBackward(plan, batch, p(&h.args), p(&h.grads))
	refused(t, "a seed of no forward pass", status.InvalidArgument, err)
	if err != nil && !strings.Contains(err.Error(), "dropout_seed is 3") {
		t.Error(err)
	}
	for seed := range uint64(3) {
		h.args.dropout_seed = seed
		must(t, attentionBackward(plan, batch, p(&h.args), p(&h.grads)))
	}
}

// Calls on a GPU allocate no Go memory, with dropout neither.
func TestCallsOnGPUAllocateNothing(t *testing.T) {
	need.ExactAllocations(t)
	cudatest.Use(t)
	// for shapes and arguments; the tensors get memory of the GPU
	h := newHostOf(t, 1, 6, 2, 1, 4, flagCausal, func(d *cAttentionDesc) { d.dropout = 0.5 })
	ctx, plan, batch := moveToGPU(t, h)
	body := func() {
		h.args.dropout_seed++
		must(t, attentionForward(plan, batch, p(&h.args)))
		must(t, attentionBackward(plan, batch, p(&h.args), p(&h.grads)))
		must(t, contextError(ctx))
	}
	body()
	const calls = 200
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range calls {
		body()
	}
	runtime.ReadMemStats(&after)
	if n := after.Mallocs - before.Mallocs; n > calls/10 {
		t.Errorf("%d allocations in %d calls forward and backward", n, calls)
	}
}

// The error for a tensor of a GPU on a context of the CPU names the context to create, and says how
// to get the plug-in if it is missing.
func TestGPUTensorOnTheCPU(t *testing.T) {
	h := newHostOf(t, 1, 6, 2, 1, 4, flagCausal)
	h.t[0].device = onCUDA
	for plugin, want := range map[string]bool{"": true, "/plugins/libulysses_cuda.so": false} {
		t.Setenv("ULYSSES_CUDA_PLUGIN", plugin)
		err := attentionForward(h.plan, h.batch, p(&h.args))
		refused(t, "a tensor of a GPU", status.InvalidArgument, err)
		if text := err.Error(); !strings.Contains(text, "q is on a GPU") || !strings.Contains(text, "ULYSSES_CUDA") ||
			strings.Contains(text, "not in the folder of this library: build it with make cuda") != want {
			t.Errorf("plug-in %q: %v", plugin, err)
		}
	}
}

// Destroying a plan or a batch leaves the GPU current that the calling thread has selected, also
// if it was another one in the call before.
func TestDestroyKeepsTheCurrentGPU(t *testing.T) {
	cudatest.Use(t)
	t.Setenv("ULYSSES_EMULATED_DEVICES", "2")
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	h := newHostOf(t, 1, 6, 2, 1, 4, flagCausal, func(*cAttentionDesc) {})
	_, plan, batch := moveToGPU(t, h)
	other, err := cuda.Open(cuda.Options{Ordinal: 1})
	if err != nil {
		t.Skip("SKIPPED: needs two GPUs: ", err)
	}
	defer other.Close()
	b, err := other.Alloc(16)
	must(t, err)
	defer b.Free()
	selected := other.SaveContext()
	for name, destroy := range map[string]func() error{
		"plan":  func() error { return planDestroy(plan) },
		"batch": func() error { return batchDestroy(batch) },
	} {
		must(t, destroy())
		if now := other.SaveContext(); now != selected {
			t.Errorf("destroying a %s: the current context is %#x, it was %#x", name, now, selected)
			other.RestoreContext(selected)
		}
	}
}
