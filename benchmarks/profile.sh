#!/usr/bin/env bash
# Profiles the Hopper forward kernel of one row of benchmarks/tune_hopper.py with Nsight Compute, and prints the main metrics.
#
#   benchmarks/profile.sh "512 D128"                 # a row, named by a part of its name
#   benchmarks/profile.sh "512 D128" profile/left512 # where the report goes (.ncu-rep is added)
#
# How to read them: docs/kernels/hopper.md, "How to look at it". Needs ncu and the permission to read counters.
set -euo pipefail
cd "$(dirname "$0")/.."
row=${1:?usage: benchmarks/profile.sh ROW [REPORT]; rows: python benchmarks/tune_hopper.py --help}
report=${2:-profile/$(tr -c '[:alnum:]\n' '_' <<<"$row")}
python=${PYTHON:-python}
command -v ncu >/dev/null || { echo "profile.sh: ncu (Nsight Compute) is not on the PATH" >&2; exit 2; }
mkdir -p "$(dirname "$report")"

# One launch each, the clocks as they are: a locked clock hides what the power limit does to long kernels.
CUTE_DSL_LINEINFO=1 ncu --clock-control none --target-processes all --kernel-name regex:forwardkernel --launch-count 1 \
  --launch-skip 1 --set full --import-source yes --force-overwrite --export "$report" \
  "$python" benchmarks/tune_hopper.py once --rows "$row" >/dev/null

metrics=(
  gpu__time_duration.sum                                             # time of the launch
  sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active # share of cycles that issue wgmma
  sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active # share of cycles the tensor cores work
  sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active         # exponentials
  lts__t_bytes.sum.per_second                                        # traffic of the level-2 cache
  lts__t_sector_hit_rate.pct                                         # of it, found there
  dram__bytes_read.sum                                               # from device memory
  dram__bytes_write.sum                                              # to it
  launch__registers_per_thread                                       # before setmaxnreg
  launch__shared_mem_per_block_dynamic                               # rings and barriers
  smsp__average_warp_latency_issue_stalled_barrier.ratio             # waiting for a turn (named barriers)
  smsp__average_warp_latency_issue_stalled_long_scoreboard.ratio     # waiting for TMA (mbarriers) or loads
  smsp__average_warp_latency_issue_stalled_gmma.ratio                # waiting for the tensor cores
)
joined=$(IFS=,; echo "${metrics[*]}")
ncu --import "$report.ncu-rep" --page raw --metrics "$joined" --print-units base
echo "samples for each instruction: ncu --import $report.ncu-rep --page source --csv"
