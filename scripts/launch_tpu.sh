#!/usr/bin/env bash
# Trains on all hosts of a Cloud TPU pod slice, where this repository lies in ~/mha_haiku
# with its .venv, and jax[tpu] in that:
#   scripts/launch_tpu.sh NAME ZONE --config=configs/text_lm.py --workdir=/shared/text_lm
# Sent again, it resumes.
set -euo pipefail
if [ $# -lt 3 ]; then
  echo "error: give the name of the TPU, its zone, and the flags of experiments.train." >&2
  echo "As: $0 my-pod us-central2-b --config=configs/text_lm.py --workdir=/shared/run" >&2
  exit 2
fi
name=$1 zone=$2
shift 2

flags=$(printf ' %q' "$@")
exec gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command \
  "cd mha_haiku && exec .venv/bin/python -m experiments.train --distributed$flags"
