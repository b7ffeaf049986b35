# make        build bin/ulysses-mpi
# make run    build, and train a small hybrid on four ranks
# make test   everything that needs no GPU
# make figures   run the examples and write the figures that README.md quotes
# make lib    lib/libulysses.so, for hosts in C, C++, Fortran and Python; check-abi, install PREFIX=…, wheel, test-python
# make gpu-check   is the plug-in right on this machine's GPU? (gpu-bundle, gpu-bench: see below)
# make deps   install the packages that build and run need (Debian, Ubuntu; as root or with sudo); make deps-test: the tests' packages.
#             As root the other targets also install them; for other users they print what is missing.
# make generate  write device/calls.go and cuda/operations.h from the operations and arguments in package device
# make cuda   build build/cuda/libulysses_cuda.so, the plug-in for NVIDIA's GPUs (needs none; see cuda/plugin.mk)

GO      ?= go
RANKS   ?= 4
SHELL   := /bin/bash
.DELETE_ON_ERROR:
.PHONY: all build generate run test unit deps deps-test have-deps have-deps-test cuda cuda-emulated cuda-races cuda-guards cuda-libs cuda-matrix mpi-shim lib check-abi install soak-c wheel test-python gpu-bundle gpu-check gpu-bench goldens goldens-check figures bench soak fuzz clean check-go lint-prose

# Open MPI's manners in containers and on machines with fewer cores than ranks: it refuses root and oversubscription without these, and
# looks for networks that a laptop or a container does not have.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export OMPI_MCA_rmaps_base_oversubscribe := 1
export OMPI_MCA_hwloc_base_binding_policy := none
export OMPI_MCA_btl_vader_single_copy_mechanism := none
export UCX_ERROR_SIGNALS :=

MPIRUN := mpirun --oversubscribe --bind-to none

all: build

# The commit that ulysses-mpi --version prints; empty outside of a git checkout.
COMMIT := $(shell git describe --always --abbrev=12 --dirty=+ --exclude='*' 2>/dev/null)
STAMP := -ldflags "-X ulysses/internal/version.commit=$(COMMIT)"

build: have-deps
	$(GO) build $(STAMP) -tags mpi -o bin/ulysses-mpi ./cmd/ulysses-mpi

run: build
	$(MPIRUN) -n $(RANKS) bin/ulysses-mpi examples/hybrid.toml

have-deps:
	@scripts/deps.sh build

have-deps-test: have-deps
	@scripts/deps.sh test

deps:
	@scripts/deps.sh build install

deps-test: deps
	@scripts/deps.sh test install

# One build at a time: tests of several packages ask for the plug-in at once.
PLUGIN = @mkdir -p build/cuda && flock build/cuda/lock $(MAKE) --no-print-directory $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell nproc)) -f cuda/plugin.mk

cuda:
	$(PLUGIN) real

# What libulysses.so opens for a host program's MPI: a file for each MPI library, lib/libulysses_mpi_ompi.so or _mpich.so. make mpi-shim
# MPICC=/opt/mpich/bin/mpicc for another than the first.
MPICC ?= mpicc
mpi-shim:
	@mkdir -p lib
	@lib=$$($(MPICC) -E -dM comm/mpi_calls.c | sed -n 's/^\#define \(OPEN_MPI\|MPICH_VERSION\) .*/\1/p'); \
	case "$$lib" in OPEN_MPI) name=ompi;; MPICH_VERSION) name=mpich;; *) echo "mpi-shim: $(MPICC) is of no MPI library that is known here: MPICC=mpicc of Open MPI or MPICH" >&2; exit 1;; esac; \
	set -x; $(MPICC) -std=gnu11 -O2 -Wall -fPIC -fvisibility=hidden -shared -o lib/libulysses_mpi_$$name.so comm/mpi_calls.c

# libulysses.so for hosts in C, C++, Fortran and Python: capi/ulysses.h. It links no MPI; lib/libulysses_mpi_*.so is what it opens for a host's.
ABI := 0
VERSION := $(shell cat internal/version/VERSION)
lib:
	@mkdir -p lib
	CGO_ENABLED=1 $(GO) build -buildmode=c-shared -ldflags "-extldflags '-Wl,--version-script=$(CURDIR)/capi/ulysses.map -Wl,-soname,libulysses.so.$(ABI)'" \
	  -o lib/libulysses.so.$(ABI) ./capi
	@rm -f lib/libulysses.so.h lib/libulysses.h lib/libulysses.so.$(ABI).h && ln -sf libulysses.so.$(ABI) lib/libulysses.so
	@if command -v $(MPICC) >/dev/null; then $(MAKE) --no-print-directory mpi-shim; else echo "lib: no $(MPICC): libulysses.so works in hosts without MPI alone"; fi

# Checks that the header compiles alone and keeps the recorded ABI, that the generated files are current, and that the library exports the header's
# functions and nothing else, links neither MPI nor CUDA, and accepts older structs.
check-abi: lib
	scripts/check-abi.sh lib/libulysses.so.$(ABI)

PREFIX ?= /usr/local
install: lib
	install -d $(DESTDIR)$(PREFIX)/lib/pkgconfig $(DESTDIR)$(PREFIX)/include
	install -m 644 capi/ulysses.h $(DESTDIR)$(PREFIX)/include/ulysses.h
	install -m 755 lib/libulysses.so.$(ABI) $(DESTDIR)$(PREFIX)/lib/
	ln -sf libulysses.so.$(ABI) $(DESTDIR)$(PREFIX)/lib/libulysses.so
	for f in lib/libulysses_mpi_*.so; do [ ! -e "$$f" ] || install -m 755 "$$f" $(DESTDIR)$(PREFIX)/lib/; done
	[ ! -e build/cuda/libulysses_cuda.so ] || install -m 755 build/cuda/libulysses_cuda.so $(DESTDIR)$(PREFIX)/lib/
	sed -e 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|' capi/ulysses.pc.in > $(DESTDIR)$(PREFIX)/lib/pkgconfig/ulysses.pc

# A C host makes 10,000 calls forward and backward under valgrind: its memory must be flat.
soak-c: lib
	@command -v valgrind >/dev/null || { echo "soak-c: no valgrind: apt-get install valgrind" >&2; exit 1; }
	$(GO) test ./capi -run TestSoak -count=1 -v -timeout 40m -soak 10000

# Go, C and Python that repeat other sources: the list of operations, and capi/ulysses.h.
generate:
	$(GO) run ./device/generate
	$(GO) run ./capi/generate

# The same sources on the host, in place of a GPU, for tests.
cuda-emulated:
	$(PLUGIN) emulated

# Every kernel under the conformance suite, watched for accesses that no barrier orders: an hour. CASES='GatedDelta|Conv1d' for some.
cuda-races:
	$(PLUGIN) races
	ULYSSES_CUDA_PLUGIN=$(CURDIR)/build/cuda/races/libulysses_cuda_emulated.so $(GO) test ./cuda -count=1 -timeout 0 -run 'TestConformance$$/^($(or $(CASES),.*))$$'

# And stopped where it reads or writes outside of its memory: five minutes.
cuda-guards: cuda-emulated
	ULYSSES_TEST_GUARDS=1 $(GO) test ./cuda -count=1 -timeout 0 -run 'TestGuards$$'

# cuDNN and what it needs, which the plug-in opens at run time, for checks that need no GPU.
cuda-libs:
	$(PLUGIN) fetch FETCH=--with-libs

# Attention that cuDNN serves, asked without a GPU, against cuda/matrix/expected.md.
cuda-matrix: cuda-libs
	$(PLUGIN) check-matrix

# For a machine with a GPU and without Go: make gpu-bundle here, carry dist/gpu.tar.gz and this repository there, make gpu-check (gpu-bench) there. On a
# machine that has both, gpu-check makes the bundle first.
gpu-bundle: have-deps cuda lib
	scripts/gpu-bundle.sh dist/gpu

dist/gpu.tar.gz:
	@command -v $(GO) >/dev/null || { echo "gpu-check: no dist/gpu.tar.gz, and no Go to make it: make gpu-bundle elsewhere and bring it along" >&2; exit 3; }
	$(MAKE) gpu-bundle

gpu-check: | dist/gpu.tar.gz
	scripts/gpu-check.sh dist/gpu.tar.gz

# Beside PyTorch's flash and cuDNN backends: tables and JSON in benchmarks/results. GPU_BENCH='--suites gpu_ops,gpu_layer' runs some.
gpu-bench: | dist/gpu.tar.gz
	benchmarks/gpu.py --python $(or $(PYTHON),python3) $(GPU_BENCH)

# The package for Python, with the library inside, and the CUDA plug-in if make cuda has built it: dist/ulysses-*.whl. PYTHON=... for another interpreter
# than the tests' own.
wheel: lib .venv/hosts
	scripts/wheel.sh $(or $(PYTHON),.venv/bin/python)

# The package against the library: alone, under mpirun with mpi4py, and with PyTorch and transformers.
# CI=true or TORCH=1 installs PyTorch and transformers (2.5 minutes, 6 GB). Otherwise the interpreter PYTHON=... may have them.
TORCH ?= $(filter true,$(CI))
test-python: lib cuda-emulated .venv/hosts $(if $(PYTHON),,$(if $(TORCH),.venv/torch))
	@$(or $(PYTHON),.venv/bin/python) -c 'import torch, transformers' 2>/dev/null || \
	  echo "test-python: no PyTorch and transformers here, so their tests are SKIPPED: make test-python TORCH=1 (installs 6 GB), or PYTHON=..." >&2
	PYTHONPATH=python $(or $(PYTHON),.venv/bin/python) -m unittest discover -s python/tests

.venv/hosts: python/tests/requirements.txt
	python3 -m venv .venv && .venv/bin/pip install -q -r $< && touch $@

.venv/torch: python/tests/torch.txt .venv/hosts
	.venv/bin/pip install -q --no-cache-dir -r $< && touch $@

# CI=true makes a skipped MPI, Slurm, golden, CUDA or PyTorch test a failure.
test: have-deps have-deps-test build cuda-libs cuda cuda-emulated
	$(GO) vet ./... && $(GO) vet -tags mpi ./...
	$(GO) test ./...
	$(GO) test -tags mpi -count=1 ./comm ./sp ./gdn ./model ./cmd/...
	$(MAKE) --no-print-directory test-python

# The goldens come from PyTorch alone; this program never writes them. Needs Python 3 and, once, the registry.
goldens: .venv/goldens
	.venv/bin/python testdata/goldens/make.py

.venv/goldens: testdata/goldens/requirements.txt
	python3 -m venv .venv && .venv/bin/pip install -q -r $< && touch $@

# docs/figures.json and the pictures: the figures that README.md and the examples quote, from runs on this machine.
figures: build
	python3 docs/figures.py $(MPIRUN) -n $(RANKS)

# Weights and logits of a folder that this program wrote, against a folder given: make goldens-check A=out/model B=testdata/goldens/models/llama
goldens-check: .venv/goldens
	.venv/bin/python testdata/goldens/check_hf.py $(A) $(B)

# A hundred kills at random moments, of the job and of a rank under mpirun, each resumed: every loss must be that of the undisturbed run.
soak: build
	ULYSSES_TEST_KILLS=50 $(GO) test ./job -run TestKill -count=1 -v -timeout 30m
	ULYSSES_TEST_KILLS=50 $(GO) test -tags mpi ./cmd/ulysses-mpi -run TestKillRank -count=1 -v -timeout 60m

bench: build .venv/peers
	$(GO) build -tags mpi -o bin/ulysses-bench ./benchmarks
	mpicc -O2 benchmarks/peers/alltoall.c -o bin/alltoall

.venv/peers: benchmarks/peers/requirements.txt
	python3 -m venv .venv && .venv/bin/pip install -q -r $< && touch $@

fuzz:
	$(GO) test ./tensor -run '^$$' -fuzz FuzzSafetensors -fuzztime 60s
	$(GO) test ./job/file -run '^$$' -fuzz FuzzParse -fuzztime 60s
	$(GO) test ./data -run '^$$' -fuzz FuzzJSONL -fuzztime 60s
	$(GO) test ./data -run '^$$' -fuzz FuzzMegatron -fuzztime 60s
	$(GO) test ./data -run '^$$' -fuzz FuzzQuickField -fuzztime 60s
	$(GO) test ./model -run '^$$' -fuzz FuzzConfig -fuzztime 60s
	$(GO) test ./capi -run '^$$' -fuzz FuzzDescriptors -fuzztime 60s
	$(GO) test ./capi -run TestTiledDescriptors -count=1 -v -tiledfuzz 60s

# Lines that do not follow the rules for prose yet, in folders where they are not enforced yet.
lint-prose:
	ULYSSES_LINT=1 $(GO) test ./internal/arch -count=1 -v -run 'TestProse$$|TestComparisonsRefuseNaN'

clean:
	rm -rf bin build out examples/out
