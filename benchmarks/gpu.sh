#!/usr/bin/env bash
# What has to be measured on a machine with GPUs, prepared: ten minutes at most, each part with its own limit and file.
#   benchmarks/gpu.sh FOLDER [options of syncbn.py]      PYTHON=... names the interpreter; ray, torch and nvidia-ml-py are there,
#                                                        ROUNDS=... the starts of each kind that are timed (3)
# One GPU: the checks of tests/gpu (real NCCL with one rank, a real fork, a lost context), the cost of a start, one rank on
# NCCL and on gloo, two ranks of gloo on the one GPU. Two or more: NCCL against gloo on one, and on all of them.
# On the test suite's fake GPUs it runs to its end too, with small networks, and every file says that it is no measurement:
#   benchmarks/gpu.sh FOLDER --models tiny --image 16 --batches 4 --largest 64K --rounds 2
set -uo pipefail
folder=$(realpath -m "${1:?usage: benchmarks/gpu.sh FOLDER [options of syncbn.py]}")
shift
cd "$(dirname "$0")/.."
mkdir -p "$folder" || exit 2
export PYTHON=${PYTHON:-python3} PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-disabled} RAY_USAGE_STATS_ENABLED=0
total_s=590
failed=0

part() { # name, seconds at most, command...
  local name=$1 most=$2 start=$SECONDS status=0
  shift 2
  local left=$((total_s - SECONDS))
  [ "$most" -le "$left" ] || most=$left
  if [ "$most" -lt 20 ]; then
    echo "$name: not run, the ten minutes are over"
    failed=1
    return
  fi
  timeout -k 10 "$most" "$@" >"$folder/$name.md" 2>"$folder/$name.log" || status=$?
  [ $status = 0 ] || failed=1
  echo "$name: $([ $status = 0 ] && echo ok || echo "FAILED ($status), see $folder/$name.log"), $((SECONDS - start)) s"
}

gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())') || exit 2
if [ "$gpus" = 0 ]; then
  echo "benchmarks/gpu.sh: no GPU here; benchmarks/syncbn.py --device cpu measures gloo on the CPU" >&2
  exit 2
fi
syncbn=("$PYTHON" benchmarks/syncbn.py --steps 3 --rounds 5 --batches 32)
echo "$gpus GPUs; results in $folder"
part check 180 tests/gpu/check.sh
if ! "$PYTHON" -c 'import ray.train' 2>/dev/null; then
  echo "start_cost, syncbn: not run, ray[train] is not installed"
  exit 1
fi
part start_cost 150 "$PYTHON" benchmarks/start_cost.py --device cuda --workers "$gpus" --rounds "${ROUNDS:-3}"
if [ "$gpus" = 1 ]; then
  part syncbn_1 130 "${syncbn[@]}" --workers 1 --minutes 1.2 --plot "$folder/syncbn_1.png" "$@"
  part syncbn_2_on_1 130 "${syncbn[@]}" --workers 2 --gpus-per-worker 0.5 --minutes 1.2 --plot "$folder/syncbn_2_on_1.png" "$@"
else
  part syncbn 260 "${syncbn[@]}" --workers 1 "$gpus" --minutes 1.5 --plot "$folder/syncbn.png" "$@"
fi
echo "$SECONDS s in all"
exit $failed
