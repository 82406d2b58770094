#!/bin/bash
# The exercise "ViT on CIFAR-10 at scale". For DDP and for FSDP: find the largest batch, train 26 epochs, upload the best
# checkpoint. Then on node 0: test both checkpoints from the bucket and compare the runs.
# After a stop, run the same command again: finished runs are skipped, an unfinished one is resumed.
#
#   S3=s3://bucket/prefix launch/vit_exercise.sh [overrides of train.py]
#   S3=s3://bucket/prefix NODES=2 NODE=0 MASTER=10.0.0.1 launch/vit_exercise.sh     # on every node, NODE counts from 0
#
# DDP="trainer.max_epochs=40" FSDP="trainer.max_epochs=30" are overrides of one strategy alone.
# STRATEGIES="ddp_sim fsdp_sim" runs on CPUs. NAME=second names other runs. ENDPOINT=http://… is another S3 service.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
read -ra strategies <<<"${STRATEGIES:-ddp fsdp}"
[[ ${S3:-} == s3://* ]] || { echo "S3 is not set. Pass S3=s3://bucket/prefix." >&2; exit 2; }

store=("s3.uri=${S3%/}" ${ENDPOINT:+"s3.endpoint_url=$ENDPOINT"})
nodes=()
if [ "${NODES:-1}" -gt 1 ]; then
  export MASTER_ADDR="${MASTER:?Pass MASTER=the address of node 0.}" MASTER_PORT="${PORT:-29500}" NODE_RANK="${NODE:?Pass NODE=0, 1, …}"
  nodes=("trainer.num_nodes=$NODES")
fi
places=() # the test needs these overrides of the training, too
for override in "$@"; do
  case $override in data.root=* | paths.* | s3.*) places+=("$override") ;; esac
done

runs=()
for strategy in "${strategies[@]}"; do
  runs+=("${NAME:-assignment}-$strategy")
  alone=${strategy%_sim}
  alone=${alone^^}
  read -ra alone <<<"${!alone:-}"
  "$python" src/train.py "experiment=vit_${strategy%_sim}" "trainer=$strategy" "run_id=${runs[-1]}" resume=auto \
    data.global_batch_size=max "${store[@]}" "${nodes[@]}" "$@" "${alone[@]}"
done
[ "${NODE:-0}" = 0 ] || exit 0
unset MASTER_ADDR MASTER_PORT NODE_RANK
for run in "${runs[@]}"; do
  "$python" src/eval.py "ckpt_path=${S3%/}/$run" "${store[@]}" "${places[@]}"
done
[ ${#runs[@]} = 1 ] || "$python" src/logbook.py compare "${runs[@]}" --md "logbook/${NAME:-assignment}.md" \
  --html "logbook/${NAME:-assignment}.html"
