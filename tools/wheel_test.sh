#!/bin/sh
# Builds our wheel, installs it into a clean environment beside megatron-core, imports it,
# uninstalls it, and checks that megatron-core's files are as they were. Called by make.
set -eu
cd "$(dirname "$0")/.."
UV="$PWD/.bootstrap/bin/uv"
PYTHON="$PWD/.venv/bin/python"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { printf 'wheel-test: %s\n' "$*"; }
pin() { sed -n "s/^    \"\($1==[^\"]*\)\".*/\1/p" pyproject.toml; }
# Every file of megatron-core and its sum, our own package and bytecode left out.
sums() { (cd "$site/megatron" && find . -name '*.py' ! -path './core/inference/coordinator/*' \
    -exec sha256sum {} + | sort); }

say "building"
git ls-files -z --cached --others --exclude-standard | xargs -0 -I{} cp -P --parents {} "$work"/ 2>/dev/null || true
"$PYTHON" -m build --wheel --outdir "$work/dist" "$work" >"$work/build.log" 2>&1 || {
    cat "$work/build.log"; exit 1; }
wheel=$(ls "$work"/dist/*.whl)
if "$PYTHON" -m zipfile -l "$wheel" | awk '{print $1}' | grep '^megatron/' \
    | grep -v '^megatron/core/inference/coordinator/'; then
    say "the wheel holds files that belong to megatron-core"; exit 1
fi

say "installing beside $(pin megatron-core) in a clean environment"
"$UV" venv --quiet --python "$PYTHON" "$work/env"
site=$("$work/env/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
UV_COMPILE_BYTECODE=0 "$UV" pip install --quiet --python "$work/env/bin/python" \
    "$(pin megatron-core)" "$(pin torch)" "$(pin numpy)"
sums >"$work/before"
UV_COMPILE_BYTECODE=0 "$UV" pip install --quiet --python "$work/env/bin/python" "$wheel"

say "importing"
(cd "$work/env" && bin/python -W ignore - "$site" <<'PY'
import inspect, sys
import megatron.core.inference.coordinator as coordinator
from megatron.core.inference.coordinator import arguments, runtime
from megatron.core.inference.coordinator.runtime import engine_start, http
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine as Engine

site = sys.argv[1]
assert coordinator.__file__.startswith(site) and arguments.__file__.startswith(site)
assert hasattr(arguments, "add_prefix_routing_args")
released = Engine.schedule_requests
coordinator.patch()
assert Engine.schedule_requests is not released
coordinator.unpatch()
assert Engine.schedule_requests is released
import megatron.training.arguments as training
assert hasattr(training, "parse_and_validate_args"), "megatron-core's own arguments are gone"
PY
)

say "uninstalling"
"$UV" pip uninstall --quiet --python "$work/env/bin/python" megatron-prefix-routing
sums >"$work/after"
cmp "$work/before" "$work/after" || { say "megatron-core's files changed"; exit 1; }
(cd "$work/env" && bin/python -W ignore -c 'import megatron.core, megatron.training.arguments')
say "passed"
