#!/bin/sh
# Builds a wheel whose core has the address and undefined-behaviour sanitizers, installs it into its
# own folder, and runs the tests of the kernels on it.
# usage: sanitize.sh PYTHON EMPTY_FOLDER [pytest arguments]
set -eu
python=$1 folder=$2
shift 2
root=$(cd "$(dirname "$0")/.." && pwd)
tests="$root/tests/core/engines/cpu"
build="$folder/build" package="$folder/package"
"$python" -m pip --quiet wheel --no-deps --wheel-dir "$folder" \
  --config-settings "build-dir=$build" --config-settings cmake.define.CLEARHEAD_SANITIZE=ON "$root"
"$python" -m pip --quiet install --no-deps --target "$package" "$folder"/clearhead-*.whl
compiler=$(sed -n 's/^CMAKE_CXX_COMPILER:[^=]*=//p' "$build/CMakeCache.txt")
# The finder of an editable install precedes every path, so it is removed.
cat >"$folder/run.py" <<END
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "skbc" not in type(finder).__module__]
sys.path.insert(0, "$package")
import clearhead._kernels, pytest
assert clearhead._kernels.__file__.startswith("$package"), clearhead._kernels.__file__
sys.exit(pytest.main(sys.argv[1:]))
END
# Long texts of one head size are enough, because others differ in numbers, not in addresses.
# The sanitizers must be loaded first, because Python was built without them. Python itself leaks.
LD_PRELOAD="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libubsan.so) \
$("$compiler" -print-file-name=libstdc++.so)" \
ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
"$python" "$folder/run.py" -q -p no:cacheprovider --timeout 1500 \
  "$tests/test_kernels.py" "$tests/test_stats.py" "$tests/test_backward.py" \
  "$tests/test_divergence.py" \
  -k "not grow and not wide_instruction and not compile and not fork \
  and not environment and not unknown_level and not (long_texts and (1] or 64]))" "$@"
