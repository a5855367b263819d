#!/usr/bin/env bash
# What runs on one GPU (CUDA or ROCm), piece by piece; leaves rows under bench/results. No registry is reached.
# Usage: bench/gpu.sh CHECKPOINT_A CHECKPOINT_B [PART…]
#   two checkpoints of one model of Qwen3-0.6B's shape; folders that do not exist are made, with random weights
#   parts: kernels stop resume april/8 long/8 short-rounds/8 dapo/8; all of them if none is named
#   MINUTES (8) is the budget of each */8 part; what it cut is measured by the next call with the same RUN (a name)
# What fails (ROCm has no fa3) is named at the end, and the rest is run. Never run yet: no row from a GPU exists.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
a=${1:?two checkpoints are needed} b=${2:?two checkpoints are needed}
shift 2
[ $# -gt 0 ] || set -- kernels stop resume april/8 long/8 short-rounds/8 dapo/8
# The attention and sampling backends that need no kernel package beside SGLang and triton.
options="--attention-backend triton --sampling-backend pytorch"
# What the GPU has, in GB of 10^9 bytes: the short presets are sized by it.
memory=$(python -c 'import torch; print(round(torch.cuda.get_device_properties(0).total_memory / 1e9))') || exit 1
run=${RUN:-$(date -u +%Y%m%d-%H%M%S)}
failed=""
try() { echo "== $*" >&2; "$@" || failed+=$'\n'"  $*"; }
checkpoints() {
  [ -e "$a/config.json" ] || try python -m bench.random_checkpoint "$a" --shape qwen3-0.6b --seed 0
  [ -e "$b/config.json" ] || try python -m bench.random_checkpoint "$b" --shape qwen3-0.6b --seed 1
}
for part in "$@"; do
  case $part in
    kernels) try python -m bench.kernels ;;
    stop) try python -m bench.stop_latency --running 64 256 1024 --reply-tokens 1000000 --server-options "$options" ;;
    resume)
      checkpoints
      for backend in flashinfer fa3 triton; do
        try python -m bench.resume --model "$a" --server-options "--attention-backend $backend" --record
      done ;;
    */8)
      checkpoints
      try python -m bench.rollout --preset "$part" --run-id "${part%/8}-8-$run" --budget-minutes "${MINUTES:-8}" \
        --gpu-gb "$memory" --checkpoints "$a" "$b" --server-options "$options" ;;
    *) failed+=$'\n'"  $part: no such part" ;;
  esac
done
try python -m bench.report
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
