#!/usr/bin/env bash
# wheel-tag.sh FILE…: the platform tag of a wheel that carries these libraries: manylinux of the newest glibc whose symbols they use, which is what such a
# tag promises (PEP 600). A library that the tag does not promise is refused, as auditwheel does, but for MPI, which the host of libulysses_mpi_* has loaded;
# so are symbols of C++ and GCC, whose versions belong to a tag too.
set -euo pipefail
allowed='^(linux-vdso|ld-linux-x86-64|ld-linux-aarch64|libc|libm|libdl|libpthread|librt|libresolv|libutil)\.so'
fail() { echo "wheel: $*" >&2; exit 1; }
machine=$(uname -m) newest=2.17 # the oldest that a manylinux of these machines has
for f in "$@"; do
  header=$(objdump -p "$f")
  case $header in *elf64-x86-64*) of=x86_64 ;; *elf64-littleaarch64*) of=aarch64 ;; *) of=unknown ;; esac
  [ $of = "$machine" ] || fail "$f is for $of, and this machine is $machine"
  for lib in $(sed -n 's/^ *NEEDED *//p' <<<"$header"); do
    [[ $lib =~ $allowed ]] || [[ ${f##*/} == libulysses_mpi_* && $lib =~ ^libmpi[a-z_]*\.so ]] || fail "$f needs $lib, which no manylinux tag promises: link it statically, or open it at run time"
  done
  ! grep -oE '\b(GLIBCXX|CXXABI|GCC)_[0-9.]+' <<<"$header" || fail "$f uses these of C++'s or GCC's runtime, which it must have inside"
  ! grep -oE '\bGLIBC_PRIVATE' <<<"$header" || fail "$f uses what is private to one glibc"
  header=${header//GLIBC_ABI_DT_RELR/GLIBC_2.36} # relative relocations, packed: a loader before 2.36 refuses them
  for version in $(grep -oE '\bGLIBC_2\.[0-9]+' <<<"$header" | cut -d_ -f2 | sort -u); do
    newest=$(printf '%s\n' "$newest" "$version" | sort -V | tail -n 1)
  done
done
echo "manylinux_${newest/./_}_$machine"
