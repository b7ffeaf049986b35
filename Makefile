# make             builds bin/ulysses-mpi; make build MPICC=mpicc.mpich builds it for MPICH
# make run         builds the program and trains a small hybrid model on four ranks
# make unit        the fast tests, for the edit loop: under two minutes on two cores
# make lint        gofmt, go vet, staticcheck, clang-format, ruff, mypy, rules for prose and files
# make format      applies gofmt, clang-format and ruff
# make test        everything that needs no GPU: lint, all Go tests, MPI, Slurm, the Python package
# make sanitize    tests with Go's race detector and with AddressSanitizer
# make lib         lib/libulysses.so, for hosts in C, C++, Fortran and Python
# make aarch64     compiles everything for AArch64, and tests the CPU kernels under qemu
# make check-abi   compares the library with capi/ulysses.h
# make install     the library, its header and pkg-config file, under PREFIX
# make wheel       the Python package with the library inside, in dist/
# make dist        the release archive, in dist/ (see CONTRIBUTING.md)
# make generate    the files that repeat other sources: operations, and capi/ulysses.h
# make cuda        build/cuda/libulysses_cuda.so, the plug-in for NVIDIA GPUs; needs no GPU
# make gpu-check   tests the plug-in on this machine's GPU; see also gpu-bundle and gpu-bench
# make figures     runs the examples and writes the figures that README.md quotes
# make deps        installs the packages that build and run need, on Debian and Ubuntu, as root or
#                  with sudo; make deps-test also installs the tests' packages. As root the other
#                  targets install missing packages as well. For other users they print the names.

GO      ?= go
RANKS   ?= 4
SHELL   := /bin/bash
.DELETE_ON_ERROR:
.PHONY: all build generate run test unit lint format notice deps deps-test have-deps \
  have-deps-test cuda cuda-emulated cuda-races cuda-races-build cuda-guards cuda-instructions \
  cuda-instructions-jobs cuda-table cuda-libs cuda-matrix mpi-shim lib portable check-abi \
  install have-prefix dist aarch64 soak-c wheel test-python gpu-bundle gpu-check gpu-bench goldens goldens-check \
  figures bench sanitize soak soak-faults fuzz clean

# The commit that ulysses-mpi --version, reports and ulysses_build_info name. It is empty outside of
# a git checkout, and where git refuses to read it, as root does one of another user.
COMMIT := $(shell git describe --always --abbrev=12 --dirty=+ --exclude='*' 2>/dev/null)
STAMP_FLAGS := -X ulysses/internal/version.commit=$(COMMIT)
STAMP := -ldflags "$(STAMP_FLAGS)"

# Builds do not record the folder of the sources. They are reproducible, and every checkout on a
# machine shares the compiled C kernels: a second checkout builds in 2 s instead of 112. go build
# fails if git refuses to read a checkout, unless it records no commit.
export GOFLAGS := $(filter-out -trimpath,$(GOFLAGS)) -trimpath $(if $(COMMIT),,-buildvcs=false)

# No package needs this long on an idle machine (four minutes). A busy machine may, and then the
# tests of a package should not be stopped: go test's default is ten minutes.
TEST_TIMEOUT ?= 40m

# Open MPI in containers and on machines with fewer cores than ranks. Without these variables it
# refuses to run as root and to oversubscribe, and looks for networks that are not there.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export OMPI_MCA_rmaps_base_oversubscribe := 1
export OMPI_MCA_hwloc_base_binding_policy := none
export OMPI_MCA_btl_vader_single_copy_mechanism := none
export UCX_ERROR_SIGNALS :=

MPIRUN := mpirun --oversubscribe --bind-to none

all: build

# The program for the Open MPI that pkg-config finds, or for the MPI library of another wrapper than
# mpicc: make build MPICC=mpicc.mpich. PROGRAM=bin/ulysses-mpich gives it another name.
MPICC ?= mpicc
PROGRAM ?= bin/ulysses-mpi
build: have-deps
	$(if $(filter mpicc,$(MPICC)),,scripts/mpi-build.sh $(MPICC)) $(GO) build $(STAMP) -tags mpi -o $(PROGRAM) ./cmd/ulysses-mpi

run: build
	$(MPIRUN) -n $(RANKS) $(PROGRAM) examples/hybrid.toml

have-deps:
	@MPICC=$(MPICC) scripts/deps.sh build

have-deps-test: have-deps
	@scripts/deps.sh test

deps:
	@scripts/deps.sh build install

deps-test: deps
	@scripts/deps.sh test install

# The lock lets one build of the plug-in run at a time: the tests of several packages start it.
# There is one compiler per core, but at most one per 3 GiB of free memory.
PLUGIN = @mkdir -p build/cuda && flock build/cuda/lock $(MAKE) --no-print-directory \
  $(if $(filter -j%,$(MAKEFLAGS)),,-j$(shell scripts/jobs.sh)) -f cuda/plugin.mk

cuda:
	$(PLUGIN) real

# lib/libulysses_mpi_ompi.so or lib/libulysses_mpi_mpich.so: the calls of one MPI library, which
# libulysses.so opens in a host program that uses MPI. For an MPI library other than the first on
# PATH: make mpi-shim MPICC=/opt/mpich/bin/mpicc
mpi-shim:
	@mkdir -p lib
	@lib=$$($(MPICC) -E -dM comm/mpi_calls.c | sed -n 's/^\#define \(OPEN_MPI\|MPICH_VERSION\) .*/\1/p'); \
	case "$$lib" in OPEN_MPI) name=ompi;; MPICH_VERSION) name=mpich;; *) echo "mpi-shim: $(MPICC) belongs to an unknown MPI library; use MPICC=mpicc of Open MPI or MPICH" >&2; exit 1;; esac; \
	set -x; $(MPICC) -std=gnu11 -O2 -Wall -fPIC -fvisibility=hidden -shared -o lib/libulysses_mpi_$$name.so comm/mpi_calls.c

# libulysses.so for hosts in C, C++, Fortran and Python; the header is capi/ulysses.h. The library
# does not link MPI: in a host that uses MPI it opens lib/libulysses_mpi_*.so.
ABI := 0
VERSION := $(shell cat internal/version/VERSION)
# The linker splits its flags at spaces, and the path of this folder may have some.
EXPORTS := \"-Wl,--version-script=$(CURDIR)/capi/ulysses.map\" -Wl,-soname,libulysses.so.$(ABI)
# $(call LIBRARY,linker flags,file) builds the library.
LIBRARY = CGO_ENABLED=1 $(GO) build -buildmode=c-shared -ldflags "$(STAMP_FLAGS) $(1)" -o $(2) ./capi
lib:
	@mkdir -p lib
	$(call LIBRARY,-extldflags '$(EXPORTS)',lib/libulysses.so.$(ABI))
	@rm -f lib/libulysses.so.h lib/libulysses.h lib/libulysses.so.$(ABI).h && ln -sf libulysses.so.$(ABI) lib/libulysses.so
	@if command -v $(MPICC) >/dev/null; then $(MAKE) --no-print-directory mpi-shim; else \
	  echo "lib: no $(MPICC), so libulysses.so works only in hosts without MPI; make deps installs it"; fi

# The library for other machines, in build/portable: make wheel and make dist take it from there.
# The objects are the same as in make lib. The linker binds them to the symbols of glibc $(GLIBC),
# so that the library also runs with that version, and with every newer one.
GLIBC ?= 2.28
portable: lib .venv/link
	@mkdir -p build/portable && rm -f build/portable/*
	GLIBC=$(GLIBC) $(call LIBRARY,-extld '\"$(CURDIR)/scripts/link.sh\"' -extldflags '$(EXPORTS)',build/portable/libulysses.so)
	@rm -f build/portable/libulysses.h && for f in lib/libulysses_mpi_*.so; do [ ! -e "$$f" ] || cp "$$f" build/portable/; done

.venv/link: tools/link.txt
	python3 -m venv .venv/link-tools && .venv/link-tools/bin/pip install -q -r $< && touch $@

# Checks that the header compiles alone and keeps the recorded ABI, that the generated files are
# current, and that the library exports the header's functions and nothing else, links neither MPI
# nor CUDA, and accepts older structs.
check-abi: lib
	scripts/check-abi.sh lib/libulysses.so.$(ABI)

# The folders may have spaces, so the shell gets them as variables. Make would split them.
# A relative PREFIX is relative to this folder. pkg-config's file has the absolute path, because
# programs are compiled in other folders.
PREFIX ?= /usr/local
WHOLE_PREFIX = $(if $(filter /%,$(firstword $(PREFIX))),,$(CURDIR)/)$(PREFIX)
install: export WHOLE_PREFIX := $(WHOLE_PREFIX)
install: export ROOT = $(DESTDIR)$(WHOLE_PREFIX)
install: have-prefix lib
	install -d "$$ROOT/lib/pkgconfig" "$$ROOT/include" "$$ROOT/share/doc/ulysses"
	install -m 644 LICENSE NOTICE CHANGELOG.md "$$ROOT/share/doc/ulysses/"
	install -m 644 capi/ulysses.h "$$ROOT/include/ulysses.h"
	install -m 755 lib/libulysses.so.$(ABI) "$$ROOT/lib/"
	ln -sf libulysses.so.$(ABI) "$$ROOT/lib/libulysses.so"
	for f in lib/libulysses_mpi_*.so; do [ ! -e "$$f" ] || install -m 755 "$$f" "$$ROOT/lib/"; done
	[ ! -e build/cuda/libulysses_cuda.so ] || install -m 755 build/cuda/libulysses_cuda.so "$$ROOT/lib/"
	{ printf 'prefix=%s\n' "$$WHOLE_PREFIX"; sed -e '/^prefix=/d; s|@VERSION@|$(VERSION)|' capi/ulysses.pc.in; } > "$$ROOT/lib/pkgconfig/ulysses.pc"
	chmod 644 "$$ROOT/lib/pkgconfig/ulysses.pc"

# An empty PREFIX, as of an unset variable of a shell, would be this folder.
have-prefix:
	@$(if $(strip $(PREFIX)),:,echo "install: PREFIX is empty; set for example PREFIX=/usr/local" >&2; exit 1)

# A C host makes 10,000 calls forward and backward under valgrind. Its memory must not grow.
soak-c: lib
	@command -v valgrind >/dev/null || { echo "soak-c: no valgrind: apt-get install valgrind" >&2; exit 1; }
	$(GO) test ./capi -run TestSoak -count=1 -v -timeout 40m -soak 10000

# The Go, C and Python files that repeat other sources: the operations of package device, and
# capi/ulysses.h.
generate:
	$(GO) run ./device/generate
	$(GO) run ./capi/generate

# Writes the tables of docs/gpu-kernels.md from the machine code. KERNELS='norm conv1d' compiles and
# writes only these files of cuda/plugin/kernels.
cuda-table:
	$(PLUGIN) kernels KERNELS='$(KERNELS)'
	$(GO) test ./cuda -count=1 -run 'TestMachineCode$$' -update

# The plug-in's sources compiled for the host, which stands in for a GPU in tests.
cuda-emulated:
	$(PLUGIN) emulated

# The plug-in that checks for races and counts accesses and multiply-adds of kernels.
cuda-races-build:
	$(PLUGIN) races

# The conformance suite on the emulated plug-in, with a check for accesses that no barrier orders.
# It takes an hour. CASES='GatedDelta|Conv1d' runs only these.
cuda-races: cuda-races-build
	ULYSSES_CUDA_PLUGIN="$(CURDIR)/build/cuda/races/libulysses_cuda_emulated.so" $(GO) test ./cuda -count=1 -timeout 0 -run 'TestConformance$$/^($(or $(CASES),.*))$$|^TestConformanceOf($(or $(CASES),Warpgroups))$$'

# The conformance suite on the emulated plug-in, which stops at accesses outside of an array's
# memory. It takes five minutes.
cuda-guards: cuda-emulated
	ULYSSES_TEST_GUARDS=1 $(GO) test ./cuda -count=1 -timeout 0 -run 'TestGuards$$'

# The conformance suite on the instructions of the GPU build, which the emulated plug-in interprets.
# It also looks for races in shared memory. It takes ten minutes. CASES='GatedDelta|Conv1d' runs
# only these. cuda-instructions-jobs runs the training jobs of the tests in the same way, in a
# quarter of an hour.
INTERPRETED := ULYSSES_EMULATED_RACES=1 ULYSSES_EMULATED_PTX="$(CURDIR)/build/cuda/ptx/kernels" \
  ULYSSES_CUDA_PLUGIN="$(CURDIR)/build/cuda/libulysses_cuda_emulated.so"
cuda-instructions: cuda cuda-emulated
	$(INTERPRETED) $(GO) test ./cuda -count=1 -timeout 0 -run 'TestConformance.*$$/^($(or $(CASES),.*))$$'
cuda-instructions-jobs: cuda cuda-emulated
	$(INTERPRETED) $(GO) test ./job -count=1 -timeout 0 -run '^TestCUDA'

# Fetches cuDNN and the libraries that it needs, for checks that need no GPU. The plug-in opens them
# at run time.
cuda-libs:
	$(PLUGIN) fetch FETCH=--with-libs

# Compares which attention cuDNN serves with cuda/matrix/expected.md. It needs no GPU.
cuda-matrix: cuda-libs
	$(PLUGIN) check-matrix

# For a machine with a GPU and without Go: run make gpu-bundle here, copy dist/gpu.tar.gz and this
# repository to that machine, and run make gpu-check or make gpu-bench there. On a machine with
# both, gpu-check makes the bundle first.
gpu-bundle: have-deps cuda lib
	scripts/gpu-bundle.sh dist/gpu

dist/gpu.tar.gz:
	@command -v $(GO) >/dev/null || { \
	  echo "gpu-check: no dist/gpu.tar.gz, and no Go to make it; run make gpu-bundle on another machine and copy the file here" >&2; exit 3; }
	$(MAKE) gpu-bundle

gpu-check: | dist/gpu.tar.gz
	scripts/gpu-check.sh dist/gpu.tar.gz

# Measures the plug-in beside PyTorch's flash and cuDNN backends, into tables and JSON in
# benchmarks/results. GPU_BENCH='--suites gpu_ops,gpu_layer' runs only these suites.
gpu-bench: | dist/gpu.tar.gz
	benchmarks/gpu.py --python $(or $(PYTHON),python3) $(GPU_BENCH)

# dist/libulysses-*.whl: the Python package with the library inside, and with the CUDA plug-in where
# make cuda has built it. PYTHON=... takes another interpreter than the tests' environment.
wheel: portable .venv/hosts
	scripts/wheel.sh $(or $(PYTHON),.venv/bin/python)

# Tests the Python package alone, under mpirun with mpi4py, and with PyTorch and transformers.
# CI=true or TORCH=1 installs PyTorch and transformers (two minutes, 2 GB). Otherwise the
# interpreter PYTHON=... may have them.
TORCH ?= $(filter true,$(CI))
test-python: build $(if $(filter true,$(CI)),portable,lib) cuda-emulated .venv/hosts $(if $(PYTHON),,$(if $(TORCH),.venv/torch))
	@$(or $(PYTHON),.venv/bin/python) -c 'import torch, transformers' 2>/dev/null || \
	  echo "test-python: no PyTorch and transformers, so their tests are SKIPPED; run make test-python TORCH=1 (installs 2 GB), or give PYTHON=..." >&2
	PYTHONPATH=python $(or $(PYTHON),.venv/bin/python) -m unittest discover -s python/tests

.venv/hosts: python/tests/requirements.txt
	python3 -m venv .venv && .venv/bin/pip install -q -r $< && touch $@

.venv/torch: python/tests/torch.txt scripts/torch-cpu.py .venv/hosts
	.venv/bin/python scripts/torch-cpu.py $< && touch $@

# CI=true makes a skipped MPI, Slurm, golden, CUDA or PyTorch test a failure.
# The tests of cmd/ulysses-mpi wait more than they compute, so they run beside the others. The other
# tests under mpirun have ranks that spin while they wait, so they run alone.
test: have-deps have-deps-test lint build cuda-libs cuda cuda-emulated
	$(GO) test -timeout $(TEST_TIMEOUT) -tags mpi -count=1 ./cmd/... & program=$$!; \
	  $(GO) test -timeout $(TEST_TIMEOUT) ./...; ended=$$?; wait $$program && exit $$ended
	$(GO) test -timeout $(TEST_TIMEOUT) -tags mpi -count=1 ./comm ./sp ./gdn ./model
	$(MAKE) --no-print-directory test-python

# All packages, without the tests that testkit/slow-tests.txt lists.
unit: have-deps
	@$(GO) test -short -timeout $(TEST_TIMEOUT) ./... \
	  -skip '^($(shell grep -v '^\#' testkit/slow-tests.txt | paste -sd'|'))$$'

# Go's race detector, then AddressSanitizer for the kernels and the memory that C and Go share. It
# takes long. RACE=./tile ASAN= checks only this package with the race detector, and RACE=
# ASAN='./tensor ./cpu' these with AddressSanitizer. Leaks are not looked for, because the Go heap,
# which points to memory of C, is not searched.
RACE ?= ./sp ./gdn ./train ./tile ./data ./job ./internal/...
ASAN ?= ./cpu ./sp ./gdn ./tile ./model ./tensor ./capi
sanitize: have-deps
	@[ -z '$(ASAN)' ] || [ -e "$$($$($(GO) env CC) -print-file-name=libasan.so)" ] || { \
	  echo "sanitize: $$($(GO) env CC) has no libasan; install the libasan of its version, or set ASAN=" >&2; exit 1; }
	[ -z '$(RACE)' ] || $(GO) test -race -short -timeout $(TEST_TIMEOUT) $(RACE)
	[ -z '$(ASAN)' ] || ASAN_OPTIONS=detect_leaks=0 $(GO) test -asan -short -timeout $(TEST_TIMEOUT) $(ASAN)

# The build for AArch64 on another machine: all packages are compiled, and each AARCH64_EVERY-th
# case of the conformance suite runs on the NEON kernels under qemu, 300 times slower than on a
# processor. The cases of Far touch more memory there than most machines have.
AARCH64 = GOARCH=arm64 CGO_ENABLED=1 CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++
AARCH64_EVERY ?= 20
aarch64: have-deps
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64-static >/dev/null || { \
	  echo "aarch64: no cross compiler or no qemu; apt-get install g++-aarch64-linux-gnu qemu-user-static" >&2; exit 1; }
	$(AARCH64) $(GO) vet ./...
	$(AARCH64) $(GO) build -o build/aarch64/ ./cmd/ulysses-mpi
	$(AARCH64) $(GO) test -timeout $(TEST_TIMEOUT) -exec 'qemu-aarch64-static -L /usr/aarch64-linux-gnu' ./cpu \
	  -every $(AARCH64_EVERY) -run 'TestConformance/neon|TestDenormals|TestTablesFor' -skip '//^Far$$'

# Checks of the sources. The tools are pinned: staticcheck in tools/go.mod, the others in
# tools/requirements.txt.
lint: .venv/lint
	GO=$(GO) scripts/lint.sh check

format: .venv/lint
	GO=$(GO) scripts/lint.sh format

.venv/lint: tools/requirements.txt
	python3 -m venv .venv/lint-tools && .venv/lint-tools/bin/pip install -q -r $< && touch $@

# NOTICE: the licenses of everything that the program and the libraries contain.
notice:
	$(GO) run ./internal/notice > NOTICE.new && mv NOTICE.new NOTICE && cp NOTICE python/NOTICE

# dist/ulysses-VERSION-linux-MACHINE.tar.gz: the program with and without MPI, the library, the
# wheel and their licenses. The CUDA plug-in is in it where make cuda has built it.
dist: have-deps build wheel
	GO=$(GO) scripts/dist.sh

# The goldens come from PyTorch alone; this program never writes them. This needs Python 3 and
# access to a package index.
goldens: .venv/goldens
	.venv/bin/python testdata/goldens/make.py

.venv/goldens: testdata/goldens/requirements.txt
	python3 -m venv .venv && .venv/bin/pip install -q -r $< && touch $@

# docs/figures.json and the pictures: the figures that README.md and the examples quote, from runs
# on this machine.
figures: build .venv/figures
	.venv/figures-tools/bin/python docs/figures.py $(MPIRUN) -n $(RANKS)

.venv/figures: tools/figures.txt
	python3 -m venv .venv/figures-tools && .venv/figures-tools/bin/pip install -q -r $< && touch $@

# Compares weights and logits of a folder that this program wrote with another folder:
# make goldens-check A=out/model B=testdata/goldens/models/llama
goldens-check: .venv/goldens
	.venv/bin/python testdata/goldens/check_hf.py $(A) $(B)

# Kills the job and a rank under mpirun at a hundred random moments and resumes each. Every loss
# must equal the loss of the undisturbed run.
soak: build
	ULYSSES_TEST_KILLS=50 $(GO) test ./job -run TestKill -count=1 -v -timeout 30m
	ULYSSES_TEST_KILLS=50 $(GO) test -tags mpi ./cmd/ulysses-mpi -run TestKillRank -count=1 -v -timeout 60m

# Injects 300 faults under mpirun and srun, and prints how many of the runs name the culprit.
soak-faults:
	ULYSSES_TEST_FAULTS=300 $(GO) test -tags mpi ./cmd/ulysses-mpi -run 'TestInjectedFaults$$' -count=1 -v -timeout 3h

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
	$(GO) test ./data -run '^$$' -fuzz FuzzFastTextField -fuzztime 60s
	$(GO) test ./model -run '^$$' -fuzz FuzzConfig -fuzztime 60s
	$(GO) test ./capi -run '^$$' -fuzz FuzzDescriptors -fuzztime 60s
	$(GO) test ./capi -run TestTiledDescriptors -count=1 -v -tiledfuzz 60s

clean:
	rm -rf bin build out examples/out
