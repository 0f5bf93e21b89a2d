#!/usr/bin/env bash
# Profiles a Hopper kernel on one case of gossamer.testing with Nsight Compute, and prints the main metrics and the
# instructions at which warps wait.
#
#   benchmarks/profile.sh window_512_causal                            # the forward kernel
#   benchmarks/profile.sh window_4096_causal backward                  # dK, dV and the sums of dQ
#   benchmarks/profile.sh window_4096_causal query_gradient            # dQ by rows, the other one of two for 64-token tiles
#   benchmarks/profile.sh window_512_causal forward profile/left512    # where the report goes (.ncu-rep is added)
#
# How to read them: docs/kernels/hopper.md, "How to look at it". Needs ncu and the permission to read counters.
set -euo pipefail
cd "$(dirname "$0")/.."
case_name=${1:?usage: benchmarks/profile.sh CASE [forward|backward|query_gradient|wide] [REPORT]}
kernel=${2:-forward}
report=${3:-profile/$case_name-$kernel}
case $kernel in
  forward | backward) module=${kernel}kernel ;;
  query_gradient) module=backwardquery ;;
  wide) module=backwardwide ;;
  *) echo "profile.sh: '$kernel' is none of forward, backward, query_gradient, wide" >&2; exit 2 ;;
esac
python=${PYTHON:-python}
command -v ncu >/dev/null || { echo "profile.sh: ncu (Nsight Compute) is not on the PATH" >&2; exit 2; }
mkdir -p "$(dirname "$report")"

# The second launch, the clocks as they are: a locked clock hides what the power limit does to long kernels.
CUTE_DSL_LINEINFO=1 ncu --clock-control none --target-processes all --kernel-name "regex:hopper$module" --launch-count 1 \
  --launch-skip 1 --set full --import-source yes --force-overwrite --export "$report" \
  "$python" benchmarks/compare_hopper.py "$case_name" --kernel "$kernel" --once >/dev/null

metrics=(
  gpu__time_duration.sum                                     # time of the launch
  sm__cycles_active.min                                      # of the multiprocessor that ended first ...
  sm__cycles_active.avg                                      # ... of all ...
  sm__cycles_active.max                                      # ... and of the last one: the balance of the items
  l1tex__throughput.avg.pct_of_peak_sustained_active         # shared memory, the operands of wgmma among what it reads
  l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum         # of it, lost to bank conflicts
  sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active # share of cycles that issue wgmma
  sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active # exponentials
  lts__throughput.avg.pct_of_peak_sustained_elapsed          # the level-2 cache
  lts__t_sector_hit_rate.pct                                 # of what is asked of it, found there
  dram__bytes_read.sum                                       # from device memory
  dram__bytes_write.sum                                      # to it
  launch__registers_per_thread                               # before setmaxnreg
  launch__shared_mem_per_block_dynamic                       # rings and barriers
)
joined=$(IFS=,; echo "${metrics[*]}")
ncu --import "$report.ncu-rep" --page raw --metrics "$joined" --print-units base
ncu --import "$report.ncu-rep" --page source --csv >"$report.csv"
"$python" benchmarks/stalls.py "$report.csv"
