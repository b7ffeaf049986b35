#!/usr/bin/env bash
# wheel-tag.sh FILE…: prints the platform tag of a wheel with these libraries: manylinux of the
# newest glibc whose symbols they use (PEP 600). Like auditwheel it refuses a library that the tag
# does not promise, except MPI, which the host of libulysses_mpi_* has loaded. It also refuses
# symbols of the runtimes of C++ and GCC, whose versions a tag limits as well.
set -euo pipefail
allowed='^(linux-vdso|ld-linux-x86-64|ld-linux-aarch64|libc|libm|libdl|libpthread|librt|libresolv|libutil)\.so'
fail() { echo "wheel: $*" >&2; exit 1; }
machine=$(uname -m) newest=2.17 # the oldest manylinux tag that PEP 600 defines for these machines
for f in "$@"; do
  header=$(objdump -p "$f")
  case $header in *elf64-x86-64*) of=x86_64 ;; *elf64-littleaarch64*) of=aarch64 ;; *) of=unknown ;; esac
  [ $of = "$machine" ] || fail "$f is for $of, but this machine is $machine"
  for lib in $(sed -n 's/^ *NEEDED *//p' <<<"$header"); do
    [[ $lib =~ $allowed ]] || [[ ${f##*/} == libulysses_mpi_* && $lib =~ ^libmpi[a-z_]*\.so ]] || fail "$f needs $lib, which no manylinux tag promises; link it statically, or open it at run time"
  done
  ! grep -oE '\b(GLIBCXX|CXXABI|GCC)_[0-9.]+' <<<"$header" || fail "$f needs these symbols of the runtime of C++ or GCC; link the runtime statically"
  ! grep -oE '\bGLIBC_PRIVATE' <<<"$header" || fail "$f uses a symbol that is private to one glibc"
  header=${header//GLIBC_ABI_DT_RELR/GLIBC_2.36} # relative relocations, packed: a loader before 2.36 refuses them
  for version in $(grep -oE '\bGLIBC_2\.[0-9]+' <<<"$header" | cut -d_ -f2 | sort -u); do
    newest=$(printf '%s\n' "$newest" "$version" | sort -V | tail -n 1)
  done
done
echo "manylinux_${newest/./_}_$machine"
