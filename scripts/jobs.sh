#!/usr/bin/env bash
# jobs.sh [MEMINFO]: prints how many compilers make may run at once: one per core, but no more than
# there are 3 GiB of free memory, which the largest file of cuDNN's frontend needs. It is at least
# 1. MEMINFO is /proc/meminfo, or another file for a test. Without it, only the cores count.
set -euo pipefail
cores=$(nproc)
available=$(sed -n 's/^MemAvailable: *\([0-9]\+\) kB$/\1/p' "${1:-/proc/meminfo}" 2>/dev/null || true)
jobs=$cores
if [ -n "$available" ] && [ $((available / (3 << 20))) -lt "$cores" ]; then
  jobs=$((available / (3 << 20)))
fi
echo $((jobs > 0 ? jobs : 1))
