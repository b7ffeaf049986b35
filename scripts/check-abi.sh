#!/usr/bin/env bash
# check-abi.sh LIBRARY: holds libulysses.so to capi/ulysses.h.
set -euo pipefail
lib=$1
header=$(dirname "$0")/../capi/ulysses.h
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "check-abi: $*" >&2; exit 1; }

strict=(-Wall -Wextra -pedantic -Werror -fsyntax-only)
gcc -std=c11 "${strict[@]}" -Wpadded -x c "$header" || fail "the header is no C11, or a struct has holes"
g++ -std=c++17 "${strict[@]}" -x c++ "$header" || fail "the header is no C++17"

# Every function that is declared, by the compiler's own view of the header.
echo '#include "ulysses.h"' | gcc -std=c11 -I"$(dirname "$header")" -E -P -xc - |
  grep -oE '\b(ulysses_[a-z_0-9]+|tiled_compute[a-z_]*)\([^*)]' | grep -v 'ulysses_tensor_of' | sed 's/(.*//' | sort -u >"$work/declared"
nm -D --defined-only "$lib" | awk '{print $3}' | sort -u >"$work/exported"
diff "$work/declared" "$work/exported" || fail "exported (>) and declared (<) functions differ"
[ "$(wc -l <"$work/declared")" -gt 40 ] || fail "only $(wc -l <"$work/declared") functions were found in the header: the test looked at nothing"

soname=$(readelf -d "$lib" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')
major=$(( $(sed -n 's/^#define ULYSSES_VERSION \([0-9]*\)u.*/\1/p' "$header") / 10000 ))
[ "$soname" = "libulysses.so.$major" ] || fail "SONAME $soname, the header's major version is $major"
readelf -d "$lib" | grep NEEDED | grep -Eiv '\[(libc|libm|libpthread|libdl|libresolv|ld-linux[^]]*)\.so' && fail "needs a library beyond libc" || true

# Go's runtime makes thread-local storage of a library initial-exec: it must fit into what the loader kept beside the program's own when the process
# started, 512 bytes in glibc (rtld.optional_static_tls) for all libraries that are opened later. Go takes one word and the error texts' pointer another;
# an eighth of it is the most that one library may take from the others.
segment=$(LC_ALL=C readelf -lW "$lib" | awk '$1 == "TLS" {print $6}')
[ -n "$segment" ] || fail "no TLS segment: Go's runtime has one, so readelf was misread"
tls=$((segment))
[ "$tls" -le 64 ] || fail "$tls bytes of static thread-local storage, 64 at most: dlopen would fail beside other libraries that have some; put it on the heap"
cat >"$work/open.c" <<'C'
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char **argv) {
  void *lib = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
  if (!lib || !dlsym(lib, "tiled_compute")) return fprintf(stderr, "%s\n", dlerror()), 1;
  return dlsym(RTLD_DEFAULT, "tiled_compute") != NULL; // local: nobody else sees it
}
C
gcc -std=gnu11 -D_GNU_SOURCE -Wall -Werror "$work/open.c" -o "$work/open"
GLIBC_TUNABLES=glibc.rtld.optional_static_tls=$tls "$work/open" "$(realpath "$lib")" || fail "dlopen with RTLD_LOCAL and $tls bytes to spare for static thread-local storage"

cat >"$work/old.c" <<'C'
#include <stdio.h>
#include <stddef.h>
#include "ulysses.h"
int main(void) { // a header that ended earlier, and one that goes on
  struct { ulysses_options o; char more[64]; } newer;
  memset(&newer, 0, sizeof newer);
  ulysses_context *c = NULL;
  newer.o.struct_size = offsetof(ulysses_options, comm);
  newer.o.comm = 99; // beyond what the older header knows
  if (ulysses_context_create_local(&newer.o, &c)) return printf("older: %s\n", ulysses_last_error()), 1;
  ulysses_context_destroy(c);
  newer.o.comm = 0, newer.o.struct_size = sizeof newer;
  if (ulysses_context_create_local(&newer.o, &c)) return printf("newer: %s\n", ulysses_last_error()), 1;
  ulysses_context_destroy(c);
  newer.more[3] = 1;
  if (ulysses_context_create_local(&newer.o, &c) != ULYSSES_INVALID_ARGUMENT) return printf("a tail that is not zero was taken\n"), 1;
  return ulysses_version() / 10000 != ULYSSES_VERSION / 10000;
}
C
cp "$lib" "$work/"
ln -s "$(basename "$lib")" "$work/libulysses.so"
gcc -std=c11 -Wall -Wextra -pedantic -Werror -I"$(dirname "$header")" "$work/old.c" -o "$work/old" -L"$work" -lulysses -Wl,-rpath,"$work" -Wno-overlength-strings
"$work/old" || fail "struct_size"
grep -q '^Libs: -L${libdir} -lulysses' "$(dirname "$header")/ulysses.pc.in" || fail "pkg-config file"
echo "check-abi: $(wc -l <"$work/declared") functions, $soname, $tls bytes of static thread-local storage"
