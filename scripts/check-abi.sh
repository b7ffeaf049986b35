#!/usr/bin/env bash
# check-abi.sh LIBRARY: compares libulysses.so, the generated files and the recorded ABI with
# capi/ulysses.h.
set -euo pipefail
cd "$(dirname "$0")/.."
lib=$(realpath "$1")
header=capi/ulysses.h
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "check-abi: $*" >&2; exit 1; }

# The header must be valid C11 and C++17, its structs must have no padding, and everything that
# earlier versions recorded must be unchanged.
strict=(-Wall -Wextra -pedantic -Werror -fsyntax-only)
gcc -std=c11 "${strict[@]}" -Wpadded -x c $header || fail "the header is not valid C11, or a struct has padding"
g++ -std=c++17 "${strict[@]}" -x c++ $header || fail "the header is not valid C++17"
# Compilers report warnings in a macro where a host uses it.
echo '#include "ulysses.h"
int main(void) { ulysses_sizes s; ULYSSES_INIT(&s); return s.reserved; }' >"$work/init.c"
gcc -std=c11 "${strict[@]}" -Wconversion -Icapi "$work/init.c" || fail "ULYSSES_INIT has warnings in C"
g++ -std=c++17 "${strict[@]}" -Wconversion -Wold-style-cast -Icapi -x c++ "$work/init.c" || fail "ULYSSES_INIT has warnings in C++"
for record in capi/testdata/abi_*.c; do
  gcc -std=c11 "${strict[@]}" -Icapi "$record" || fail "the header changes the ABI recorded in $record"
done
${GO:-go} run ./capi/generate -check || fail "a generated file is not current; run make generate"

# The library must export the functions that the header declares, and nothing else. The compiler
# preprocesses the header.
echo '#include "ulysses.h"' | gcc -std=c11 -Icapi -E -P -xc - | tr '\n' ' ' |
  grep -oE '\b(ulysses_[a-z_0-9]+|tiled_compute[a-z_]*)\([^*)]' | grep -v 'ulysses_tensor_of' | sed 's/(.*//' | sort -u >"$work/declared"
nm -D --defined-only "$lib" | awk '{print $3}' | sort -u >"$work/exported"
diff "$work/declared" "$work/exported" || fail "exported (>) and declared (<) functions differ"
[ "$(wc -l <"$work/declared")" -gt 40 ] || fail "found only $(wc -l <"$work/declared") functions in the header; this script does not parse it correctly"

soname=$(readelf -d "$lib" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
major=$(( $(sed -n 's/^#define ULYSSES_VERSION \([0-9]*\)u.*/\1/p' $header) / 10000 ))
[ "$soname" = "libulysses.so.$major" ] || fail "the SONAME is $soname, the header's major version is $major"
readelf -d "$lib" | grep NEEDED | grep -Eiv '\[(libc|libm|libpthread|libdl|libresolv|ld-linux[^]]*)\.so' && fail "the library needs a library other than libc" || true

# The thread-local storage of Go's runtime is initial-exec. It must fit into the space that the
# loader reserved when the process started: 512 bytes in glibc (rtld.optional_static_tls) for all
# libraries that are opened later. Go uses one word, and the pointer to a thread's buffers another.
# One library should use at most an eighth of the space.
segment=$(LC_ALL=C readelf -lW "$lib" | awk '$1 == "TLS" {print $6}')
[ -n "$segment" ] || fail "no TLS segment found, but Go's runtime has one; this script does not parse readelf's output correctly"
tls=$((segment))
[ "$tls" -le 64 ] || fail "$tls bytes of static thread-local storage, at most 64 are allowed, because dlopen could fail beside other libraries; allocate it on the heap"
cat >"$work/open.c" <<'C'
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv) {
  void *lib = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
  if (!lib || !dlsym(lib, "tiled_compute")) return fprintf(stderr, "%s\n", dlerror()), 1;
  return dlsym(RTLD_DEFAULT, "tiled_compute") != NULL; // RTLD_LOCAL: not visible to others
}
C
gcc -std=gnu11 -D_GNU_SOURCE -Wall -Werror "$work/open.c" -o "$work/open"
GLIBC_TUNABLES=glibc.rtld.optional_static_tls=$tls "$work/open" "$lib" || fail "dlopen with RTLD_LOCAL fails with $tls bytes of static thread-local storage"

# Structs of an older and of a newer version of the header.
cat >"$work/old.c" <<'C'
#include <stdio.h>
#include <stddef.h>
#include "ulysses.h"
int main(void) {
  struct { ulysses_options o; char more[64]; } newer;
  memset(&newer, 0, sizeof newer);
  ulysses_context *c = NULL;
  newer.o.struct_size = offsetof(ulysses_options, comm);
  newer.o.comm = 99; // beyond the end of the older struct
  if (ulysses_context_create_local(&newer.o, &c)) return printf("older: %s\n", ulysses_last_error()), 1;
  ulysses_context_destroy(c);
  newer.o.comm = 0, newer.o.struct_size = sizeof newer;
  if (ulysses_context_create_local(&newer.o, &c)) return printf("newer: %s\n", ulysses_last_error()), 1;
  ulysses_context_destroy(c);
  newer.more[3] = 1;
  if (ulysses_context_create_local(&newer.o, &c) != ULYSSES_INVALID_ARGUMENT) return printf("unknown fields that are not zero were accepted\n"), 1;
  return ulysses_version() / 10000 != ULYSSES_VERSION / 10000;
}
C
cp "$lib" "$work/"
ln -s "$(basename "$lib")" "$work/libulysses.so"
gcc -std=c11 -Wall -Wextra -pedantic -Werror -Icapi "$work/old.c" -o "$work/old" -L"$work" -lulysses -Wl,-rpath,"$work" -Wno-overlength-strings
"$work/old" || fail "struct_size is handled wrongly"
grep -q '^Libs: -L"${libdir}" -lulysses' capi/ulysses.pc.in || fail "capi/ulysses.pc.in does not link -lulysses"
echo "check-abi: $(wc -l <"$work/declared") functions, $soname, $tls bytes of static thread-local storage"
