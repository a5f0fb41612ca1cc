#!/usr/bin/env bash
# Resolves the .in files in a clean environment of its own and writes runtime.txt and test.txt beside them.
# usage: lock.sh PYTHON   (the oldest Python that is supported; the lock serves all of them)
set -euo pipefail
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
# What torch pins by itself depends on which build of it is at hand, so it is never written down here.
own() { pip freeze --all | grep -viE '^(pip|torch|triton|nvidia-.*|cuda-.*)(==| @)' | LC_ALL=C sort -f; }

"$1" -m venv "$work/venv"
pip install --upgrade pip
pip install -r torch.txt -r runtime.in
pip install --no-deps -r runtime-nodeps.in
{ echo "# Written by \`make lock\` from runtime.in and runtime-nodeps.in; installed with --no-deps."; own; } >"$work/runtime.txt"
pip install -r test.in -c "$work/runtime.txt"
{ echo "# Written by \`make lock\` from test.in; installed with --no-deps beside runtime.txt."
  own | grep -vxFf "$work/runtime.txt"; } >"$work/test.txt"
mv "$work/runtime.txt" "$work/test.txt" .
