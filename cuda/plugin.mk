# The plug-in, built from the same sources for GPUs (real: nvcc) and for the host that stands in for one (emulated: g++). The Makefile calls
# this file from the root, with -j.
#
#   NVCC=/usr/local/cuda/bin/nvcc   this compiler instead of the fetched one
#   NVIDIA=…/site-packages/nvidia   headers from there (cudnn, nccl, cu13); with NVCC and FRONTEND nothing is fetched
#   FRONTEND=…/include              headers of cudnn-frontend
#   ARCHS='80 90a 100'              for these GPUs (a release); otherwise Hopper, and what this machine has
#   CUDA_DIR=…                      where things are fetched to
CUDA_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ulysses/cuda13
NVIDIA   ?= $(CUDA_DIR)/nvidia
FRONTEND ?= $(CUDA_DIR)/cudnn_frontend/include
NVCC     ?= $(CUDA_DIR)/nvidia/cu13/bin/nvcc
# Hopper with its own instructions needs the a.
ARCHS    ?= $(sort 90a $(patsubst 90,90a,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d .)))
GENCODE  ?= $(foreach a,$(ARCHS),-gencode arch=compute_$(a),code=sm_$(a))
OUT      := build/cuda
SRC      := cuda/plugin
SHELL    := /bin/bash
.DELETE_ON_ERROR:
.PHONY: real emulated races matrix check-matrix fetch force

# GPUs: $(SRC), kernels, libraries and gpu. The host: $(SRC), kernels and emulated.
shared   := $(wildcard $(SRC)/kernels/*.cu $(SRC)/*.cu)
kernels  := $(shared) $(wildcard $(SRC)/libraries/*.cu)
host     := $(filter-out %_test.cpp,$(wildcard $(SRC)/libraries/*.cpp))
standin  := $(filter-out %_test.cpp,$(wildcard $(SRC)/emulated/*.cpp))
exports  := $(SRC)/exports.map

real: $(OUT)/libulysses_cuda.so
emulated: $(OUT)/libulysses_cuda_emulated.so
races: $(OUT)/races/libulysses_cuda_emulated.so

# As system headers: what a compiler given by hand brings along comes before them.
includes := -I$(SRC) $(addprefix -isystem ,$(NVIDIA)/cu13/include $(NVIDIA)/cudnn/include $(NVIDIA)/nccl/include $(FRONTEND))
static   := -static-libstdc++ -static-libgcc
warnings := -Wall -Wextra -Wno-unused-parameter

# --- for GPUs ---------------------------------------------------------------------------------------------------------------------------
fetched := $(findstring $(CUDA_DIR),$(NVCC) $(NVIDIA) $(FRONTEND))
fetch:
	@$(if $(fetched),scripts/fetch-cuda.sh $(CUDA_DIR) $(FETCH))

# What objects depend on beside their sources, in a file that changes only with it.
settings = $(NVCC) $(GENCODE) $(includes) $$(sha256sum < cuda/requirements.txt)
$(OUT)/real/settings: force | fetch
	@mkdir -p $(@D)
	@echo "$(settings)" | cmp -s - $@ || echo "$(settings)" > $@

# Tests read the instructions of these: for tensor cores, and for accesses of 16 bytes.
$(addprefix $(OUT)/real/kernels/,attention_mma.cu.o delta_%.cu.o elementwise.cu.o gated_norm.cu.o gates.cu.o norm.cu.o rope.cu.o swiglu.cu.o): flags := --no-compress

# What ptxas says of registers, local memory and spills is kept: a test reads it.
$(OUT)/real/%.cu.o: $(SRC)/%.cu cuda/plugin.mk $(OUT)/real/settings
	@mkdir -p $(@D)
	@echo 'nvcc $*.cu'
	@$(NVCC) -std=c++17 -O3 $(GENCODE) $(flags) -Xptxas -v -Xcompiler -fPIC,-fvisibility=hidden,-Wall $(includes) -MMD -MP -MF $(@:.o=.d) -MT $@ -c -o $@ $< \
	  > $@.ptxas 2>&1 || { cat $@.ptxas; exit 1; }
	@grep -E 'warning|error' $@.ptxas || true

# The frontend of cuDNN is one large unit: without its JSON, which halves the memory that takes, and little optimised.
$(OUT)/real/libraries/sdpa.cpp.o: level := -O1
$(OUT)/real/%.cpp.o: $(SRC)/%.cpp cuda/plugin.mk $(OUT)/real/settings
	@mkdir -p $(@D)
	@echo 'g++ $*.cpp'
	@$(CXX) -std=c++17 $(or $(level),-O2) -fPIC -fvisibility=hidden -fvisibility-inlines-hidden $(warnings) -DCUDNN_FRONTEND_SKIP_JSON_LIB $(includes) -MMD -MP -c -o $@ $<

# The longest compilations first, so that none is left alone at the end.
objects := $(host:$(SRC)/%.cpp=$(OUT)/real/%.cpp.o) $(kernels:$(SRC)/%.cu=$(OUT)/real/%.cu.o)
$(OUT)/libulysses_cuda.so: $(objects) $(exports)
	@echo 'link libulysses_cuda.so'
	@cat $(kernels:$(SRC)/%.cu=$(OUT)/real/%.cu.o.ptxas) > $(OUT)/ptxas.txt
	@$(NVCC) $(GENCODE) -shared -cudart static -Xlinker --version-script=$(exports) -Xlinker -z,defs,-z,relro,--gc-sections,--exclude-libs,ALL \
	  $(addprefix -Xcompiler ,$(static)) -o $@.new $(objects) -ldl -lpthread -lrt
	@strip --strip-unneeded $@.new && mv $@.new $@

# What cuDNN serves, asked without a GPU: the plug-in's own objects in a program, and a stand-in for the driver's library.
matrix: $(OUT)/matrix/matrix $(OUT)/matrix/stub/libcuda.so.1
$(OUT)/matrix/matrix.o: cuda/matrix/matrix.cpp cuda/plugin.mk $(OUT)/real/settings
	@mkdir -p $(@D)
	@$(CXX) -std=c++17 -O1 $(warnings) $(includes) -MMD -MP -c -o $@ $<
$(OUT)/matrix/matrix: $(OUT)/matrix/matrix.o $(objects)
	@$(NVCC) $(GENCODE) -cudart static -o $@ $^ -ldl -lpthread -lrt
$(OUT)/matrix/stub/libcuda.so.1: cuda/matrix/stub.py $(OUT)/real/settings
	@python3 $< $(NVIDIA)/cudnn/lib $(@D)

# The whole table must be the expected one; of a part, as tests run it, every line must be in it.
check-matrix: matrix
	@LD_LIBRARY_PATH=$(OUT)/matrix/stub ULYSSES_NVIDIA_ROOT=$(NVIDIA) $(OUT)/matrix/matrix cuda/matrix/h200.json $(PART) > $(OUT)/matrix.md || { cat $(OUT)/matrix.md; exit 1; }
	@$(if $(PART),! grep -Fxv -f cuda/matrix/expected.md $(OUT)/matrix.md,grep '^|' cuda/matrix/expected.md | diff - $(OUT)/matrix.md && cat $(OUT)/matrix.md)

# --- on the host ------------------------------------------------------------------------------------------------------------------------
# The same arithmetic as a GPU's, no more fused than the sources say; fmaf as an instruction where the processor has it.
fused   := $(shell grep -qm1 -w fma /proc/cpuinfo && grep -qm1 -w avx2 /proc/cpuinfo && echo -mfma -mavx2)
emulate := $(CXX) -std=c++17 -O2 -g1 -fno-strict-aliasing -ffp-contract=off $(fused) -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -DULY_EMULATED -I$(SRC) $(warnings) -Wno-unknown-pragmas

# Kernels say where they use an address that is not aligned (emulated/blocks.cpp): a GPU stops there.
$(OUT)/emulated/%.cu.o: $(SRC)/%.cu cuda/plugin.mk
	@mkdir -p $(@D)
	@echo 'g++ $*.cu'
	@$(emulate) -fsanitize=alignment -MMD -MP -x c++ -c -o $@ $<
# And, built for that, which of their accesses nothing orders (emulated/races/races.cpp).
$(OUT)/races/%.cu.o: $(SRC)/%.cu cuda/plugin.mk
	@mkdir -p $(@D)
	@echo 'g++ $*.cu, for races'
	@$(emulate) -fsanitize=thread --param=tsan-instrument-func-entry-exit=0 -Wno-maybe-uninitialized -MMD -MP -x c++ -c -o $@ $<
$(OUT)/emulated/%.cpp.o: $(SRC)/emulated/%.cpp cuda/plugin.mk
	@mkdir -p $(@D)
	@echo 'g++ emulated/$*.cpp'
	@$(emulate) -MMD -MP -c -o $@ $<

pieces := $(shared:$(SRC)/%.cu=$(OUT)/emulated/%.cu.o) $(standin:$(SRC)/emulated/%.cpp=$(OUT)/emulated/%.cpp.o)
$(OUT)/libulysses_cuda_emulated.so: $(pieces) $(SRC)/emulated/exports.map
	@echo 'link libulysses_cuda_emulated.so'
	@$(CXX) -shared -Wl,--version-script=$(SRC)/emulated/exports.map -Wl,-z,defs -o $@.new $(pieces) -ldl -lpthread -lrt && mv $@.new $@

watched := $(shared:$(SRC)/%.cu=$(OUT)/races/%.cu.o) $(standin:$(SRC)/emulated/%.cpp=$(OUT)/emulated/%.cpp.o) $(OUT)/emulated/races/races.cpp.o
$(OUT)/races/libulysses_cuda_emulated.so: $(watched) $(SRC)/emulated/exports.map
	@echo 'link races/libulysses_cuda_emulated.so'
	@$(CXX) -shared -Wl,--version-script=$(SRC)/emulated/exports.map -Wl,-z,defs -o $@.new $(watched) -ldl -lpthread -lrt && mv $@.new $@

-include $(foreach d,real emulated races,$(wildcard $(OUT)/$(d)/*.d $(OUT)/$(d)/*/*.d)) $(wildcard $(OUT)/matrix/*.d)
