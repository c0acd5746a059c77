#!/usr/bin/env bash
# Trains on all GPUs of some hosts of a Slurm cluster, one process each:
#   sbatch scripts/launch_slurm.sh --config=configs/text_lm.py --workdir=/shared/text_lm
# from the repository, whose .venv all hosts see. Sent again, it resumes.
#SBATCH --job-name=mha_haiku
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
# Two minutes before time is over, every process saves and ends.
#SBATCH --signal=TERM@120
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"

environment=${MHA_HAIKU_ENVIRONMENT:-$PWD/.venv}
exec srun --kill-on-bad-exit=1 \
  "$environment/bin/python" -m experiments.train --distributed "$@"
