#!/usr/bin/env bash
# Install one hash-pinned requirements file into .venv: with uv, or with pip where uv cannot be had.
# DEVICE=cpu: PyTorch without CUDA. Its builds are on PyTorch's own index, so of those two packages the versions are
# pinned and no hashes; CUDA's libraries are left out, all else is checked as ever.
# Bytecode is compiled now, because where Python may not write it every start takes 8 s longer.
set -euo pipefail
file=$1
python=.venv/bin/python
case ${DEVICE:-} in
"" | cpu) ;;
*) echo "error: DEVICE=$DEVICE is not known: leave it out, or take DEVICE=cpu." >&2 && exit 2 ;;
esac
if [ ! -x .venv/bin/uv ]; then
  $python -m pip install -q --require-hashes -r launch/uv.txt || echo "uv cannot be installed; going on with pip."
fi
if [ "${DEVICE:-}" = cpu ] && grep -q '^torch==' "$file"; then
  [ -x .venv/bin/uv ] || { echo "error: DEVICE=cpu needs uv, and uv cannot be installed: leave DEVICE out." >&2 && exit 2; }
  mapfile -t torch < <(grep -oE '^torch(vision)?==[0-9.]+' "$file")
  .venv/bin/uv pip install --python $python --compile-bytecode --no-deps --torch-backend cpu "${torch[@]}"
  awk '/^[a-z]/ { cuda = /^(torch|torchvision|triton)==/ || /^(cuda|nvidia)-/ && !/^nvidia-ml-py==/ } !cuda' "$file" >.venv/cpu.txt
  file=.venv/cpu.txt
fi
if [ -x .venv/bin/uv ]; then
  .venv/bin/uv pip install --python $python --require-hashes --compile-bytecode -r "$file"
else
  $python -m pip install --require-hashes -r "$file"
  $python -m compileall -q -j 0 .venv/lib || true # some packages ship templates that do not compile
fi
$python -m compileall -q src
if [ -d src/lockstep ] && grep -q '^\[build-system\]' pyproject.toml; then # this repository: the package in editable form
  $python -m pip install -q --no-deps --no-build-isolation --no-index -e . || echo "The package was not installed in editable form."
fi
# src/ on the path of every REPL and notebook of this environment, from whichever folder
echo "$PWD/src" >"$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lockstep.pth"
