#!/usr/bin/env bash
# Install one hash-pinned requirements file into .venv: with uv, or with pip where uv cannot be had.
# DEVICE= names the build of PyTorch: cpu, or CUDA as cu126, cu128 and cu130; auto asks the driver. Left out, it is the pinned
# build of the package index, with hashes. The others are on PyTorch's own index: torch and torchvision come by their pinned
# versions, CUDA's libraries by what torch asks for, without hashes; all else is checked as ever.
# Bytecode is compiled now, because where Python may not write it every start takes 8 s longer.
set -euo pipefail
file=$1
python=.venv/bin/python
end() { echo "error: $1" >&2 && exit 2; }
hashed=(--require-hashes --compile-bytecode)
if [ ! -x .venv/bin/uv ]; then
  $python -m pip install -q --require-hashes -r launch/uv.txt || echo "uv cannot be installed; going on with pip."
fi
# The package was the distribution lockstep up to 2.0.0: its files would stay below the new ones.
if compgen -G '.venv/lib/python*/site-packages/lockstep-*.dist-info' >/dev/null; then
  $python -m pip uninstall -q -y lockstep
fi
if grep -q '^torch==' "$file"; then
  device=${DEVICE:-}
  if [ "$device" = auto ]; then # the package is in src/, or in the wheel of a project
    package=src
    if [ ! -d src/lockstep ]; then
      package=.venv/package
      $python -m zipfile -e vendor/lockstep_vision-*.whl $package
    fi
    device=$(PYTHONPATH=$package $python -m lockstep.process.gpu_builds)
  fi
  case $device in
  "" | cpu | cu126 | cu128 | cu130) ;;
  *) end "DEVICE=$device is not known: leave it out, or take cpu, cu126, cu128, cu130 or auto." ;;
  esac
  pinned=cu$(sed -nE 's/^cuda-toolkit==([0-9]+)\.([0-9]+).*/\1\2/p' "$file")
  again=()
  if [ "$(cat .venv/.device 2>/dev/null || true)" != "$device" ]; then # another build has the same version
    again=(--reinstall-package torch --reinstall-package torchvision)
  fi
  if [ "${device:-$pinned}" = "$pinned" ]; then
    hashed+=("${again[@]}")
  else
    [ -x .venv/bin/uv ] || end "DEVICE=$device needs uv, and uv cannot be installed: leave DEVICE out."
    mapfile -t torch < <(grep -oE '^torch(vision)?==[0-9.]+' "$file")
    build=(--python $python --torch-backend "$device" "${again[@]}")
    if [ "$device" = cpu ]; then build+=(--no-deps); fi
    if ! .venv/bin/uv pip install -q --dry-run "${build[@]}" "${torch[@]}" 2>.venv/torch.log; then
      if grep -q 'Failed to fetch' .venv/torch.log; then
        end "DEVICE=$device takes PyTorch from download.pytorch.org, which cannot be reached from here: leave DEVICE out for the pinned build ($pinned)."
      fi
      end "download.pytorch.org has no ${torch[*]} for $device (.venv/torch.log): leave DEVICE out for the pinned build ($pinned), or take another."
    fi
    awk '/^[a-z]/ { cuda = /^(torch|torchvision|triton)==/ || /^(cuda|nvidia)-/ && !/^nvidia-ml-py==/ } !cuda' "$file" >.venv/rest.txt
    .venv/bin/uv pip install --python $python --no-deps "${hashed[@]}" -r .venv/rest.txt
    .venv/bin/uv pip install --compile-bytecode "${build[@]}" "${torch[@]}"
    file=
  fi
fi
if [ -z "$file" ]; then
  : # all is installed
elif [ -x .venv/bin/uv ]; then
  .venv/bin/uv pip install --python $python "${hashed[@]}" -r "$file"
else
  $python -m pip install --require-hashes -r "$file"
  $python -m compileall -q -j 0 .venv/lib || true # some packages ship templates that do not compile
fi
# Only now the build is installed: after a failure the next installation takes it again.
if grep -q '^torch==' "$1"; then echo "$device" >.venv/.device; fi
$python -m compileall -q src
if [ -d src/lockstep ] && grep -q '^\[build-system\]' pyproject.toml; then # this repository: the package in editable form
  $python -m pip install -q --no-deps --no-build-isolation --no-index -e . || echo "The package was not installed in editable form."
fi
# src/ on the path of every REPL and notebook of this environment, from whichever folder
echo "$PWD/src" >"$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lockstep.pth"
