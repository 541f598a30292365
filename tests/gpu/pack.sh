#!/bin/sh
# Collects what tests/gpu needs on a machine without network: wheels, in build/gpu-pack.
#
#     tests/gpu/pack.sh [VERSION]
#
# VERSION is that machine's Python (python3 --version there), by default that of .venv. torch is
# left out, with all that it brings: the machine has it. Called by make gpu-pack.
set -eu
cd "$(dirname "$0")/../.."
UV=.bootstrap/bin/uv
PACK=build/gpu-pack
LIMIT_MIB=64
version=${1:-$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')}

say() { printf 'gpu-pack: %s\n' "$*"; }
download() {
    # pip takes each platform literally: a newer glibc does not stand for the older ones.
    "$UV" run --quiet --no-project --with pip python -m pip download --quiet --no-deps \
        --only-binary :all: --python-version "$version" --dest "$PACK" \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
        --platform manylinux_2_26_x86_64 --platform manylinux_2_24_x86_64 \
        --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        --platform manylinux_2_12_x86_64 --platform manylinux2010_x86_64 \
        --platform manylinux_2_5_x86_64 --platform manylinux1_x86_64 "$@"
}

rm -rf "$PACK"
mkdir -p "$PACK"
git describe --always --dirty >"$PACK/commit"
echo torch >"$PACK/excluded.txt"
"$UV" pip compile --quiet --group gpu --excludes "$PACK/excluded.txt" --no-header --no-annotate \
    --python-version "$version" --python-platform x86_64-manylinux_2_28 \
    --output-file "$PACK/requirements.txt" >/dev/null
rm "$PACK/excluded.txt"
echo setuptools >>"$PACK/requirements.txt"  # torch.utils imports it, and so does megatron-core
say "collecting wheels for Python $version"
download --requirement "$PACK/requirements.txt"
download pip
mv "$PACK"/pip-*.whl "$PACK/pip.whl"

size=$(du -sm "$PACK" | cut -f1)
say "$size MiB in $PACK"
if [ "$size" -gt "$LIMIT_MIB" ]; then
    say "that is more than $LIMIT_MIB MiB: what is so large?"
    du -m "$PACK"/* | sort -rn | head -5
    exit 1
fi
say "on the machine, in a checkout that holds $PACK: tests/gpu/run_offline.sh"
