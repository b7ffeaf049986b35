#!/usr/bin/env bash
# lint.sh check [FILE...]: runs every check of the sources and names all that fail.
# lint.sh format: formats the sources in place.
#
# With FILEs only the formatters and ruff run, on these files: for a hook before a commit.
# make lint and make format call this script, after they have installed the tools.
set -uo pipefail
cd "$(dirname "$0")/.."
mode=${1:?usage: lint.sh check|format [FILE...]}
shift
go=${GO:-go}
bin=.venv/lint-tools/bin
[ -x $bin/ruff ] || { echo "lint: no $bin/ruff; run make .venv/lint" >&2; exit 1; }

# sources PATTERN...: the tracked files among the arguments of this script, or all of them.
sources() { git ls-files -z -- "$@"; }
if [ $# -gt 0 ]; then
  given=("$@")
  sources() {
    local f p
    for f in "${given[@]}"; do
      for p in "$@"; do
        # shellcheck disable=SC2053
        [[ $f == $p ]] && printf '%s\0' "$f"
      done
    done
  }
fi
c=('*.c' '*.h' '*.cpp' '*.hpp' '*.cu' '*.cuh' '*.inc')

failed=()
# step NAME COMMAND...: runs a check and keeps its name if it fails.
step() {
  local name=$1 began=$SECONDS
  shift
  if "$@"; then echo "lint: $name: ok ($((SECONDS - began)) s)"; else
    failed+=("$name")
    echo "lint: $name: FAILED" >&2
  fi
}

check_gofmt() {
  local files
  files=$(sources '*.go' | xargs -0r gofmt -l)
  [ -z "$files" ] || { echo "$files: not formatted; run make format" >&2; return 1; }
}
check_clang() { sources "${c[@]}" | xargs -0r $bin/clang-format --dry-run -Werror; }
check_ruff() { sources '*.py' | xargs -0r $bin/ruff check -q && sources '*.py' | xargs -0r $bin/ruff format -q --check; }
vet() { $go vet ./... && $go vet -tags mpi ./...; }
staticcheck() {
  local tool="$go tool -modfile=tools/go.mod staticcheck"
  $tool ./... && $tool -tags mpi ./comm ./cmd/... ./testkit/...
}

case $mode in
  format)
    sources '*.go' | xargs -0r gofmt -w
    sources "${c[@]}" | xargs -0r $bin/clang-format -i
    $bin/ruff check -q --fix
    $bin/ruff format -q
    ;;
  check)
    step gofmt check_gofmt
    step clang-format check_clang
    step ruff check_ruff
    if [ $# -eq 0 ]; then
      step mypy $bin/mypy --no-error-summary
      step "go vet" vet
      step staticcheck staticcheck
      step "imports, comparisons, prose" $go test ./internal/arch
    fi
    [ ${#failed[@]} -eq 0 ] || { (IFS=,; echo "lint: failed: ${failed[*]}" >&2); exit 1; }
    ;;
  *) echo "lint: $mode is neither check nor format" >&2; exit 1 ;;
esac
