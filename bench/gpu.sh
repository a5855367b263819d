#!/usr/bin/env bash
# Kernels, stop latency, resumes under three attention backends and the /8 presets on one GPU (CUDA or ROCm); leaves rows
# under bench/results. No registry is reached. What fails (ROCm has no fa3) is named at the end.
# Usage: bench/gpu.sh CHECKPOINT_A CHECKPOINT_B   (two checkpoints of one model, of the shape of Qwen3-4B)
# Needs SGLang, torch and this repository importable. Never run yet: no row from a GPU exists.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
a=${1:?two checkpoints are needed} b=${2:?two checkpoints are needed}
# The attention and sampling backends that need no kernel package beside SGLang and triton.
options="--attention-backend triton --sampling-backend pytorch"
python -m bench.kernels
python -m bench.stop_latency --running 64 256 1024 --reply-tokens 1000000
failed=""
for backend in flashinfer fa3 triton; do
  python -m bench.resume --model "$a" --server-options "--attention-backend $backend" --record || failed+=" $backend"
done
for preset in april/8 long/8 short-rounds/8 dapo/8; do
  python -m bench.rollout --preset "$preset" --budget-minutes 9 --checkpoints "$a" "$b" --server-options "$options"
done
python -m bench.report
[ -z "$failed" ] || { echo "resumes failed under:$failed" >&2; exit 1; }
