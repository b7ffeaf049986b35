#!/usr/bin/env bash
# gpu-check.sh [BUNDLE]: tests the plug-in on this machine's GPU. It needs at least one GPU,
# NVIDIA's libraries (ULYSSES_NVIDIA_ROOT, if the loader does not find them), and the output of
# gpu-bundle.sh (the archive, or its unpacked folder). It does not need Go. It prints a line for
# each test when the test ends, then the counts.
#
# PART=1 to 8 runs a part of the checks; each part ends within MINUTES (8). CHECKS="operations
# device" selects checks instead. Without both, all checks run, without a limit for the whole.
#
#   1  hello device nccl library     5  comm processes
#   2  operations                    6  jobs
#   3  attention                     7  sanitizer
#   4  kernels                       8  warpgroups
#
# Exit status: 0 if all checks passed, 1 if some failed or did not run, 2 if PART, CHECKS or MINUTES
# is wrong, 3 if there is no bundle, 77 if there is no GPU and nothing was checked. The logs are in
# one archive, gpu-check.tar.gz or, of a part, gpu-check-PART.tar.gz, in $OUT (BUNDLE/logs without
# OUT), which is written again after each check.
set -uo pipefail
cd "$(dirname "$0")/.."

# Wrong settings end here: with a name that is ignored, a run would pass without its checks.
parts=([1]="hello device nccl library" [2]=operations [3]=attention [4]=kernels [5]="comm processes" [6]=jobs [7]=sanitizer [8]=warpgroups)
wrong() { echo "gpu-check: $1" >&2; exit 2; }
[[ ${MINUTES:-8} =~ ^[0-9]+(\.[0-9]+)?$ ]] || wrong "MINUTES=$MINUTES is not a number"
if [ -n "${PART:-}" ]; then
  [[ $PART =~ ^[1-${#parts[@]}]$ ]] || wrong "there is no part $PART; set PART to 1 to ${#parts[@]}"
  [ -z "${CHECKS:-}" ] || wrong "PART=$PART and CHECKS=\"$CHECKS\" are both set; set one of them"
  CHECKS=${parts[PART]}
fi
for check in ${CHECKS:-}; do
  [[ " ${parts[*]} " == *" $check "* ]] || wrong "there is no check $check; CHECKS may have ${parts[*]}"
done

. scripts/gpu-env.sh "${1:-dist/gpu.tar.gz}"
logs=$bundle/logs/${PART:-all}
archive=${OUT:-$bundle/logs}/gpu-check${PART:+-$PART}.tar.gz
rm -rf "$logs" && mkdir -p "$logs" "$(dirname "$archive")"
passed=0 failed=0 skipped=0 unstarted=

# Seconds until the end of the part, with time to write the archive.
end=$(awk -v m="${MINUTES:-8}" 'BEGIN { print int(60 * m) - 15 }')
left() { if [ -n "${PART:-}" ]; then echo $((end - SECONDS)); else echo 100000; fi; }
# within LIMIT CHECK: sets limit to the limit of a check or the time that is left; status 1 if the
# check cannot begin.
within() {
  local rest
  rest=$(left)
  [ "$rest" -ge 20 ] || { unstarted+=" $2"; return 1; }
  limit=$(($1 < rest ? $1 : rest))
}
keep() { tar czf "$archive.new" -C "$logs" . 2> /dev/null && mv "$archive.new" "$archive"; }
trap keep EXIT

"$bundle/bin/ulysses-mpi" doctor > "$logs/doctor.log" 2>&1
# A GPU exists if the driver, the device files or the plug-in reports one. If one of them does, the
# checks must find it.
if ! grep -q '^GPU ' <<< "$(nvidia-smi -L 2> /dev/null)" && ! compgen -G '/dev/nvidia[0-9]*' > /dev/null && ! grep -q '^  GPU [0-9]' "$logs/doctor.log"; then
  echo "gpu-check: no GPU on this machine; nothing was checked (77)"
  exit 77
fi
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2> /dev/null

wanted() { [ -z "${CHECKS:-}" ] || [[ " $CHECKS " == *" $1 "* ]]; }
line() { # line OUTCOME SECONDS NAME [WHY]
  case $1 in ok) passed=$((passed + 1)) ;; FAILED) failed=$((failed + 1)) ;; *) skipped=$((skipped + 1)) ;; esac
  printf '%-7s %7s s  %s\n' "$1" "$2" "$3${4:+: $4}"
}

# shown prints the end of a failed check's output, because the log may not outlive the machine.
shown() { tail -n "$1" | cut -c1-400 | sed 's/^ */        /'; }

# tests NAME FOLDER LIMIT PROGRAM ARGUMENTS…: runs a test program in its package's folder. Each
# test, and each of its direct subtests, is a check, whose line is printed when it ends.
tests() {
  local name=$1 folder=$2 limit log=$logs/${1// /-}.log begin=$SECONDS code
  within "$3" "$1" || return
  shift 3
  # Only test2json prints the line of a subtest when it ends; its lines begin with a control
  # character.
  (cd "$folder" && timeout -k 10 "$limit" "$@" -test.v=test2json -test.timeout "$((limit - 5))s" 2>&1; echo $? > "$log.code") |
    sed -u 's/\x16//g' | tee "$log" |
    grep --line-buffered -E '^ *--- (PASS|FAIL|SKIP): [^/ ]+(/[^/ ]+)? |SKIPPED' | {
      found=0 why=
      while read -r dashes outcome test seconds; do
        if [ "$dashes" != --- ]; then  # the output of a test comes before its outcome
          why="$dashes $outcome $test $seconds" why=${why#*SKIPPED}
          continue
        fi
        found=1
        seconds=${seconds#(} seconds=${seconds%s)}
        case $outcome in
          PASS:) line ok "$seconds" "$name: $test" ;;
          SKIP:) line skipped "$seconds" "$name: $test" "${why#: }" ;;
          FAIL:) line FAILED "$seconds" "$name: $test" "${log##*/}" ;;
        esac
        why=
      done
      echo "$found $passed $failed $skipped" > "$log.counts"
    }
  read -r found passed failed skipped < "$log.counts"
  code=$(cat "$log.code")
  rm -f "$log.counts" "$log.code"
  [ "$code" = 0 ] || grep -E '_test\.go:[0-9]+: |^panic: |^fatal error: |^SIG' "$log" | grep -v SKIPPED | shown 30
  if [ "$code" = 124 ] || [ "$code" = 137 ] || grep -q '^panic: test timed out' "$log"; then line FAILED $((SECONDS - begin)) "$name" "ran past $limit s: ${log##*/}"
  elif [ "$code" != 0 ] && ! grep -qE '^ *--- FAIL: ' "$log"; then line FAILED $((SECONDS - begin)) "$name" "exit $code: $(tail -1 "$log" | cut -c1-160)"
  elif [ "$found" = 0 ]; then line FAILED $((SECONDS - begin)) "$name" "no test ran: ${log##*/}"; fi
  keep
}

# run NAME LIMIT COMMAND…: exit status 0 passes, 77 is skipped.
run() {
  local name=$1 limit log=$logs/${1// /-}.log begin=$SECONDS
  within "$2" "$1" || return
  shift 2
  timeout -k 10 "$limit" "$@" > "$log" 2>&1
  case $? in
    0) line ok $((SECONDS - begin)) "$name" ;;
    77) line skipped $((SECONDS - begin)) "$name" "$(grep -o 'SKIPPED.*\|Duplicate GPU.*' "$log" | head -1 | sed 's/^SKIPPED: //' | cut -c1-160)" ;;
    124 | 137)
      line FAILED $((SECONDS - begin)) "$name" "ran past $limit s: ${log##*/}"
      shown 15 < "$log"
      ;;
    *)
      line FAILED $((SECONDS - begin)) "$name" "$(grep -iE 'error|fail|refus' "$log" | tail -1 | cut -c1-200) (${log##*/})"
      shown 15 < "$log"
      ;;
  esac
  keep
}

# Two ranks run a job on the CPU, over the loopback interface if there is no other. If this fails,
# no check with several ranks can pass.
wanted hello && run hello 60 mpirun --oversubscribe --bind-to none -n 2 "$bundle/bin/ulysses-mpi" testdata/goldens/attention-gqa-packed/job.toml \
  --set device.backend=cpu --set parallel.ulysses=2 --set "output.dir=$bundle/out/hello" --set output.overwrite=true

# Every operation compared with float64 on the default kernels: all but attention, then attention,
# for which cuDNN builds many plans; then the other kernels; then the device.
wanted operations && tests operations cuda 470 "$bundle/tests/cuda.test" -test.run '^TestConformance$' -test.skip '^TestConformance$/^Attention'
wanted attention && tests attention cuda 470 "$bundle/tests/cuda.test" -test.run '^TestConformance$/^Attention'
wanted kernels && tests kernels cuda 470 "$bundle/tests/cuda.test" -test.run '^TestConformanceOfKernels$'
wanted warpgroups && tests warpgroups cuda 240 "$bundle/tests/cuda.test" -test.run '^TestConformanceOfWarpgroups$'
# Tests that need a compiler, the build folder or no GPU are left out; make test runs them.
wanted device && tests device cuda 240 "$bundle/tests/cuda.test" -test.skip '^Test(Conformance|ConformanceOfKernels|ConformanceOfWarpgroups|AttentionIndex|DeltaIndex|Fragments|GemmLayout|NCCLTimeout|NCCLPlugin|Conv1dIndex|SDPAShape|SDPASplit|IndexArithmetic|Emulator|Races|BuiltFile|Registers|Vectors|TensorCores|AbsentOfTheBuiltPlugin|Libraries|RefusedPlugins|NoPlugin|Installed|WithoutDriver|Matrix|GPUCheck|GPUCheckNames|GPUBench)$'

# Ranks that share a GPU: goroutines and processes, through mapped memory and through the host.
wanted comm && tests comm comm 300 "$bundle/tests/comm.test" -test.run '^TestCUDA'
wanted processes && tests processes cmd/ulysses-mpi 300 "$bundle/tests/ulysses-mpi.test" -test.run '^TestCUDA'

# NCCL with one rank, then with two ranks on this GPU. NCCL accepts the latter only if the ranks
# seem to be on different machines.
nccl() {
  local ranks=$1 job=testdata/goldens/llama-sgd-packed/job.toml out=$bundle/out/nccl-$1
  local set=(--set "output.dir=$out" --set device.backend=cuda --set device.dtype=f32 --set device.comm=nccl --set parallel.ulysses=0 --set parallel.ring=1 --set output.model=false --set output.overwrite=true)
  local apps=() common=(-x ULYSSES_CUDA_PLUGIN -x ULYSSES_NVIDIA_ROOT -x ULYSSES_TIMEOUT=60s)
  for ((r = 0; r < ranks; r++)); do
    apps+=(-n 1 "${common[@]}" -x "NCCL_HOSTID=ulysses-$r" -x NCCL_SOCKET_IFNAME=lo -x NCCL_NET=Socket -x NCCL_IB_DISABLE=1 -x NCCL_NET_PLUGIN=none
      -x NCCL_MNNVL_ENABLE=0 -x NCCL_NVLS_ENABLE=0 -x NCCL_RAS_ENABLE=0 -x NCCL_MAX_CTAS=4 "$bundle/bin/ulysses-mpi" "$job" "${set[@]}" :)
  done
  unset "apps[-1]"
  mpirun --oversubscribe --bind-to none "${apps[@]}"
}
# The first loss must be that of the golden file.
nccl_losses() {
  local want got
  nccl "$1" || { grep -q 'Duplicate GPU' "$logs/nccl-$1.log" && exit 77; exit 1; }
  want=$(tr -d ' \n' < testdata/goldens/llama-sgd-packed/case.json | grep -oE '"losses":\[[0-9.]+' | grep -oE '[0-9.]+$')
  got=$(head -1 "$bundle/out/nccl-$1/metrics.jsonl" | grep -oE '"loss":[0-9.]+' | cut -d: -f2)
  echo "loss $got, PyTorch $want"
  awk -v a="$got" -v b="$want" 'BEGIN { d = a - b; exit !(a > 0 && d < 2e-4 && d > -2e-4) }'
}
if wanted nccl; then
  export -f nccl nccl_losses
  export bundle logs
  run "nccl 1" 90 bash -c 'nccl_losses 1'
  run "nccl 2" 120 bash -c 'nccl_losses 2'
fi

# The library in host programs: C with its own streams and memory, with one rank, threads and
# processes; PyTorch.
if wanted library; then
  if [ -z "${ULYSSES_TEST_CUDART:-}" ]; then
    for f in "${ULYSSES_NVIDIA_ROOT:-/none}"/{cu13,cuda_runtime}/lib/libcudart.so.1[23] /usr/local/cuda/lib64/libcudart.so.1[23]; do
      [ -e "$f" ] && export ULYSSES_TEST_CUDART=$f && break
    done
  fi
  for mode in alone hostile threads; do run "library $mode" 180 "$bundle/tests/gpu-host" $mode; done
  for ranks in 1 2 3 4; do
    run "library processes $ranks" 180 mpirun --oversubscribe --bind-to none -x ULYSSES_CUDA_PLUGIN -x ULYSSES_NVIDIA_ROOT -x ULYSSES_TEST_CUDART -n $ranks "$bundle/tests/gpu-host-mpi"
  done
  run "library PyTorch" 300 env PYTHONPATH=python "ULYSSES_LIBRARY=$bundle/lib" python3 python/tests/test_gpu.py
fi

# Jobs: PyTorch's goldens, the CPU's losses, attention.
wanted jobs && tests jobs job 470 "$bundle/tests/job.test" -test.run '^TestCUDA'

# Accesses outside of allocations, on small shapes.
if wanted sanitizer; then
  sanitizer=(env -C cuda compute-sanitizer --tool memcheck --error-exitcode 9 "$bundle/tests/cuda.test" -test.timeout 470s)
  if ! command -v compute-sanitizer > /dev/null; then
    line skipped 0 sanitizer "compute-sanitizer is not on the PATH"
  elif timeout 120 "${sanitizer[@]}" -test.run '^TestInfo$' > "$logs/sanitizer.log" 2>&1; [ $? != 0 ] && grep -q 'Device not supported' "$logs/sanitizer.log"; then
    line skipped 0 sanitizer "compute-sanitizer does not support this device"
  else
    for ops in 'Copy|Cast|Fill|Add|Scale' 'ColumnSum|Sum|Gemm' 'RMSNorm|AddRMSNorm|Rope|SwiGLU' 'Embedding|CrossEntropy|AdamW|SGD' 'Dropout|Experts' 'AttentionWide' \
      'GatedRMSNorm|SigmoidGate|Conv1d|DeltaGates' 'DeltaStates|DeltaLaws'; do
      run "sanitizer ${ops//|/ }" 240 "${sanitizer[@]}" -test.run "^TestConformance\$/^($ops)\$"
    done
    run "sanitizer attention on tensor cores" 240 "${sanitizer[@]}" -test.run '^TestAttentionOnTensorCores$'
  fi
fi

[ -z "$unstarted" ] || echo "gpu-check: not run, because the part's time is over:$unstarted"
total=$((passed + failed + skipped))
echo "gpu-check: $total checks: $passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] && [ $passed -gt 0 ] && [ -z "$unstarted" ]
