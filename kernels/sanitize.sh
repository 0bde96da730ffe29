#!/bin/sh
# Builds the core with the address and undefined-behaviour sanitizers in a copy of the package and
# runs tests/test_kernels.py on it.      usage: sanitize.sh PYTHON EMPTY_FOLDER [pytest arguments]
set -eu
python=$1 folder=$2
shift 2
root=$(cd "$(dirname "$0")/.." && pwd)
build="$folder/build" package="$folder/package"
cmake -S "$root" -B "$build" -DCLEARHEAD_SANITIZE=ON -DPython_EXECUTABLE="$python" >"$folder/cmake.log"
cmake --build "$build" --parallel >"$folder/build.log"
mkdir -p "$package"
cp -r "$root/src/clearhead" "$package/"
rm -f "$package"/clearhead/_kernels*.so
cp "$build"/_kernels*.so "$package/clearhead/"
compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[^=]*=//p' "$build/CMakeCache.txt")
# The sanitizer must come first in a process that did not ask for it, and Python itself leaks.
LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so) \
$("$compiler" -print-file-name=libstdc++.so)" \
ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
PYTHONPATH="$package" "$python" -m pytest -q -p no:cacheprovider --timeout 1500 "$root/tests/test_kernels.py" \
  -k "not grow and not wide_instruction and not compile and not fork" "$@"
