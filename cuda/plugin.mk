# The plug-in is built from the same sources for GPUs (real: nvcc) and for the host, which emulates
# a GPU (emulated: g++). The Makefile calls this file from the root folder, with -j.
#
#   NVCC=/usr/local/cuda/bin/nvcc   this compiler instead of the fetched one
#   NVIDIA=…/site-packages/nvidia   headers (cudnn, nccl, cu13); with NVCC and FRONTEND, too,
#                                   nothing is fetched
#   FRONTEND=…/include              headers of cudnn-frontend
#   ARCHS='80 90 100'               GPUs to build for (a release); default: Hopper and the GPUs of
#                                   this machine
#   CUDA_DIR=…                      folder for fetched files, of one kind of machine
CUDA_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ulysses/cuda13$(patsubst %,-%,$(filter-out x86_64,$(shell uname -m)))
NVIDIA   ?= $(CUDA_DIR)/nvidia
FRONTEND ?= $(CUDA_DIR)/cudnn_frontend/include
NVCC     ?= $(CUDA_DIR)/nvidia/cu13/bin/nvcc
# 90 is built as 90a, which has Hopper's own instructions: all GPUs of compute capability 9.0 do.
ARCHS    ?= $(sort 90 $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d .))
GENCODE  ?= $(foreach a,$(patsubst 90,90a,$(ARCHS)),-gencode arch=compute_$(a),code=sm_$(a))
OUT      := build/cuda
SRC      := cuda/plugin
SHELL    := /bin/bash
.DELETE_ON_ERROR:
.PHONY: real emulated races kernels matrix check-matrix fetch force

# GPUs: $(SRC), kernels, libraries and gpu. The host: $(SRC), kernels and emulated.
shared   := $(wildcard $(SRC)/kernels/*.cu $(SRC)/*.cu)
kernels  := $(shared) $(wildcard $(SRC)/libraries/*.cu)
host     := $(filter-out %_test.cpp,$(wildcard $(SRC)/libraries/*.cpp))
emulator  := $(filter-out %_test.cpp,$(wildcard $(SRC)/emulated/*.cpp $(SRC)/emulated/ptx/*.cpp))
exports  := $(SRC)/exports.map

real: $(OUT)/libulysses_cuda.so $(shared:$(SRC)/%.cu=$(OUT)/ptx/%.ptx)
emulated: $(OUT)/libulysses_cuda_emulated.so
races: $(OUT)/races/libulysses_cuda_emulated.so

# As system headers: the headers of a compiler that the user names come first.
includes := -I$(SRC) $(addprefix -isystem ,$(NVIDIA)/cu13/include $(NVIDIA)/cudnn/include $(NVIDIA)/nccl/include $(FRONTEND))
static   := -static-libstdc++ -static-libgcc
warnings := -Wall -Wextra -Wno-unused-parameter

# --- for GPUs
fetched := $(findstring $(CUDA_DIR),$(NVCC) $(NVIDIA) $(FRONTEND))
fetch:
	@$(if $(fetched),scripts/fetch-cuda.sh $(CUDA_DIR) $(FETCH))

# The settings that objects depend on besides their sources, in a file that changes only with them.
settings = $(NVCC) $(GENCODE) $(includes) $$(sha256sum < cuda/requirements.txt)
$(OUT)/real/settings: force | fetch
	@mkdir -p $(@D)
	@echo "$(settings)" | cmp -s - $@ || echo "$(settings)" > $@

# Tests read the instructions of these objects (cuda/built_test.go, cuda/machine_test.go).
$(OUT)/real/kernels/%.cu.o: flags := --no-compress

# The output of ptxas on registers, local memory and spills is kept, because a test reads it. The
# PTX, for Hopper if it is among the GPUs, is kept as well: the emulated plug-in can run it
# (emulated/ptx).
$(OUT)/real/%.cu.o $(OUT)/ptx/%.ptx: $(SRC)/%.cu cuda/plugin.mk $(OUT)/real/settings
	@rm -rf $(OUT)/real/$*.kept && mkdir -p $(OUT)/real/$*.kept $(dir $(OUT)/ptx/$*)
	@echo 'nvcc $*.cu'
	@$(NVCC) -std=c++17 -O3 $(GENCODE) $(flags) -Xptxas -v -Xcompiler -fPIC,-fvisibility=hidden,-Wall $(includes) -MMD -MP -MF $(OUT)/real/$*.cu.d -MT '$(OUT)/real/$*.cu.o $(OUT)/ptx/$*.ptx' \
	  --keep --keep-dir $(OUT)/real/$*.kept -c -o $(OUT)/real/$*.cu.o $< > $(OUT)/real/$*.cu.o.ptxas 2>&1 || { cat $(OUT)/real/$*.cu.o.ptxas; exit 1; }
	@cp $(OUT)/real/$*.kept/*90a.ptx $(OUT)/ptx/$*.ptx 2>/dev/null || cp $$(ls $(OUT)/real/$*.kept/*.ptx | head -n 1) $(OUT)/ptx/$*.ptx
	@rm -rf $(OUT)/real/$*.kept
	@grep -E 'warning|error' $(OUT)/real/$*.cu.o.ptxas || true

# cuDNN's frontend is one large unit. It is compiled without its JSON code, which halves the memory
# of the compiler, and with little optimization.
$(OUT)/real/libraries/sdpa.cpp.o: level := -O1
$(OUT)/real/%.cpp.o: $(SRC)/%.cpp cuda/plugin.mk $(OUT)/real/settings
	@mkdir -p $(@D)
	@echo 'g++ $*.cpp'
	@$(CXX) -std=c++17 $(or $(level),-O2) -fPIC -fvisibility=hidden -fvisibility-inlines-hidden $(warnings) -DCUDNN_FRONTEND_SKIP_JSON_LIB $(includes) -MMD -MP -c -o $@ $<

# The longest compilations come first, so that none of them runs alone at the end.
objects := $(host:$(SRC)/%.cpp=$(OUT)/real/%.cpp.o) $(kernels:$(SRC)/%.cu=$(OUT)/real/%.cu.o)
$(OUT)/libulysses_cuda.so: $(objects) $(exports)
	@echo 'link libulysses_cuda.so'
	@cat $(kernels:$(SRC)/%.cu=$(OUT)/real/%.cu.o.ptxas) > $(OUT)/ptxas.txt
	@$(NVCC) $(GENCODE) -shared -cudart static -Xlinker --version-script=$(exports) -Xlinker -z,defs,-z,relro,--gc-sections,--exclude-libs,ALL \
	  $(addprefix -Xcompiler ,$(static)) -o $@.new $(objects) -ldl -lpthread -lrt
	@strip --strip-unneeded $@.new && mv $@.new $@

# Some kernels alone, for the tables of docs/gpu-kernels.md.
kernels: $(foreach k,$(or $(KERNELS),$(basename $(notdir $(wildcard $(SRC)/kernels/*.cu)))),$(OUT)/real/kernels/$(k).cu.o)

# A program with the plug-in's objects, and a stub of the driver's library, show what cuDNN
# supports. No GPU is needed.
matrix: $(OUT)/matrix/matrix $(OUT)/matrix/stub/libcuda.so.1
$(OUT)/matrix/matrix.o: cuda/matrix/matrix.cpp cuda/plugin.mk $(OUT)/real/settings
	@mkdir -p $(@D)
	@$(CXX) -std=c++17 -O1 $(warnings) $(includes) -MMD -MP -c -o $@ $<
$(OUT)/matrix/matrix: $(OUT)/matrix/matrix.o $(objects)
	@$(NVCC) $(GENCODE) -cudart static -o $@ $^ -ldl -lpthread -lrt
$(OUT)/matrix/stub/libcuda.so.1: cuda/matrix/stub.py $(OUT)/real/settings
	@python3 $< $(NVIDIA)/cudnn/lib $(@D)

# With PART, as in tests, every printed line must be in the expected table. Without PART, the tables
# must be equal.
check-matrix: matrix
	@LD_LIBRARY_PATH=$(OUT)/matrix/stub ULYSSES_NVIDIA_ROOT=$(NVIDIA) $(OUT)/matrix/matrix cuda/matrix/h200.json $(PART) > $(OUT)/matrix.md || { cat $(OUT)/matrix.md; exit 1; }
	@$(if $(PART),! grep -Fxv -f cuda/matrix/expected.md $(OUT)/matrix.md,grep '^|' cuda/matrix/expected.md | diff - $(OUT)/matrix.md && cat $(OUT)/matrix.md)

# --- on the host
# The same arithmetic as on a GPU: multiply-adds are fused only where the sources say so. fmaf is an
# instruction if the processor has it, as every AArch64 does.
fused   := $(if $(filter x86_64,$(shell uname -m)),$(shell grep -qm1 -w fma /proc/cpuinfo && grep -qm1 -w avx2 /proc/cpuinfo && echo -mfma -mavx2))
emulate := $(CXX) -std=c++17 -O2 -g1 -fno-strict-aliasing -ffp-contract=off $(fused) -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -DULY_EMULATED -I$(SRC) $(warnings) -Wno-unknown-pragmas

# A kernel stops at misaligned addresses, as on a GPU (emulated/signals.cpp).
$(OUT)/emulated/%.cu.o: $(SRC)/%.cu cuda/plugin.mk
	@mkdir -p $(@D)
	@echo 'g++ $*.cu'
	@$(emulate) -fsanitize=alignment -MMD -MP -x c++ -c -o $@ $<
# The build for races also stops at accesses that nothing orders (emulated/races/races.cpp).
$(OUT)/races/%.cu.o: $(SRC)/%.cu cuda/plugin.mk
	@mkdir -p $(@D)
	@echo 'g++ $*.cu, for races'
	@$(emulate) -fsanitize=thread --param=tsan-instrument-func-entry-exit=0 -Wno-maybe-uninitialized -MMD -MP -x c++ -c -o $@ $<
$(OUT)/emulated/%.cpp.o: $(SRC)/emulated/%.cpp cuda/plugin.mk
	@mkdir -p $(@D)
	@echo 'g++ emulated/$*.cpp'
	@$(emulate) -MMD -MP -c -o $@ $<

emulated_objects := $(shared:$(SRC)/%.cu=$(OUT)/emulated/%.cu.o) $(emulator:$(SRC)/emulated/%.cpp=$(OUT)/emulated/%.cpp.o)
$(OUT)/libulysses_cuda_emulated.so: $(emulated_objects) $(SRC)/emulated/exports.map
	@echo 'link libulysses_cuda_emulated.so'
	@$(CXX) -shared -Wl,--version-script=$(SRC)/emulated/exports.map -Wl,-z,defs -o $@.new $(emulated_objects) -ldl -lpthread -lrt && mv $@.new $@

races_objects := $(shared:$(SRC)/%.cu=$(OUT)/races/%.cu.o) $(emulator:$(SRC)/emulated/%.cpp=$(OUT)/emulated/%.cpp.o) $(OUT)/emulated/races/races.cpp.o
$(OUT)/races/libulysses_cuda_emulated.so: $(races_objects) $(SRC)/emulated/exports.map
	@echo 'link races/libulysses_cuda_emulated.so'
	@$(CXX) -shared -Wl,--version-script=$(SRC)/emulated/exports.map -Wl,-z,defs -o $@.new $(races_objects) -ldl -lpthread -lrt && mv $@.new $@

-include $(foreach d,real emulated races,$(wildcard $(OUT)/$(d)/*.d $(OUT)/$(d)/*/*.d)) $(wildcard $(OUT)/matrix/*.d)
