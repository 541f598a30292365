#!/bin/sh
# Runs tests/gpu on a machine without network, whose Python has torch: see pack.sh.
#
#     tests/gpu/run_offline.sh [arguments of pytest]
#
# PYTHON names that Python, else it is python3. The figures are in build/gpu.json afterwards.
set -eu
cd "$(dirname "$0")/../.."
PACK=build/gpu-pack
VENV=build/gpu-venv

python=${PYTHON:-python3}
"$python" -m venv --clear --without-pip --system-site-packages "$VENV"
# A Python that is a venv itself is not that venv's system: what is beside torch comes last.
site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/machine.pth"
# pip runs out of its wheel, so that the machine needs none; and no dependency is looked for.
"$VENV/bin/python" "$PACK/pip.whl/pip" install --quiet --no-index --no-deps --find-links "$PACK" \
    --requirement "$PACK/requirements.txt" --editable .
# Plugins that the machine has, and this version of pytest may not suit, stay out.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
exec "$VENV/bin/python" -m pytest -p pytest_timeout -m gpu tests/gpu "$@"
