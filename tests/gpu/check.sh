#!/usr/bin/env bash
# Checks on a machine with one real GPU what the double cannot show. Needs python3, torch 2.11 or later and nvidia-ml-py as
# they are there; neither Ray nor an install. Ten minutes at most. Prints Markdown; exit 1 if a check failed.
#   tests/gpu/check.sh > benchmarks/results/gpu_check_<gpu>_<yyyymm>.md
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
exec timeout -k 10 590 "${PYTHON:-python3}" tests/gpu/check.py
