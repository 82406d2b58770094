#!/usr/bin/env bash
# Install one hash-pinned requirements file into .venv: with uv, or with pip where uv cannot be had.
# Bytecode is compiled now, because where Python may not write it every start takes 8 s longer.
set -euo pipefail
file=$1
python=.venv/bin/python
if [ ! -x .venv/bin/uv ]; then
  $python -m pip install -q --require-hashes -r launch/uv.txt || echo "uv cannot be installed; going on with pip."
fi
if [ -x .venv/bin/uv ]; then
  .venv/bin/uv pip install --python $python --require-hashes --compile-bytecode -r "$file"
else
  $python -m pip install --require-hashes -r "$file"
  $python -m compileall -q -j 0 .venv/lib || true # some packages ship templates that do not compile
fi
$python -m compileall -q src
# src/ on the path of every REPL and notebook of this environment, from whichever folder
echo "$PWD/src" >"$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lockstep.pth"
