#!/usr/bin/env bash
# Profiles a kernel with Nsight Compute and prints the main metrics and the instructions at which warps wait: a Hopper
# kernel on one case of gossamer.testing, or the kernel of a sum over the neighbours of a million particles.
#
#   benchmarks/profile.sh window_512_causal                            # the forward kernel
#   benchmarks/profile.sh window_4096_causal backward                  # dK, dV and the sums of dQ
#   benchmarks/profile.sh window_4096_causal query_gradient            # dQ by rows, the other one of two for 64-token tiles
#   benchmarks/profile.sh window_512_causal forward profile/left512    # where the report goes (.ncu-rep is added)
#   benchmarks/profile.sh particles force                              # or sum, sum_slopes, force_slopes
#
# How to read them: docs/kernels/hopper.md, "How to look at it"; of particles docs/profiling.md. Needs ncu and the permission to read counters.
set -euo pipefail
cd "$(dirname "$0")/.."
case_name=${1:?usage: benchmarks/profile.sh CASE [forward|backward|query_gradient|wide] [REPORT]}
kernel=${2:-forward}
report=${3:-profile/$case_name-$kernel}
if [ "$case_name" = particles ]; then
  kernel=${2:-force}
  report=${3:-profile/$case_name-$kernel}
fi
case $kernel in
  sum | sum_slopes | force | force_slopes) module=kernelRadial ;;
  forward | backward) module=${kernel}kernel ;;
  query_gradient) module=backwardquery ;;
  wide) module=backwardwide ;;
  *) echo "profile.sh: '$kernel' is none of forward, backward, query_gradient, wide; sum, sum_slopes, force, force_slopes" >&2; exit 2 ;;
esac
python=${PYTHON:-python}
command -v ncu >/dev/null || { echo "profile.sh: ncu (Nsight Compute) is not on the PATH" >&2; exit 2; }
mkdir -p "$(dirname "$report")"

# The second launch, the clocks as they are: a locked clock hides what the power limit does to long kernels.
if [ "$module" = kernelRadial ]; then
  pattern=radialdevice$module
  command=(-m gossamer.bench.particles "$kernel")
  metrics=(
    gpu__time_duration.sum                                       # of the launch
    smsp__inst_executed.sum                                      # instructions of warps
    smsp__issue_active.avg.pct_of_peak_sustained_active          # cycles in which a scheduler issues one
    smsp__thread_inst_executed_per_inst_executed.ratio           # lanes at work in it
    sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active  # products and additions
    sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active  # comparisons, selections, integers
    sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active   # exponentials, reciprocal square roots, counts of bits
    sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active  # loads, stores, shuffles
    sm__warps_active.avg.pct_of_peak_sustained_active            # of 64 warps
    launch__registers_per_thread
    l1tex__t_sector_hit_rate.pct                                 # of loads, found in the first cache
    lts__t_sector_hit_rate.pct                                   # of the others, found in the second
    dram__bytes_read.sum
    l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum
    sm__cycles_active.min                                        # of the multiprocessor that ended first ...
    sm__cycles_active.max                                        # ... and of the last one
  )
  for stall in not_selected long_scoreboard wait short_scoreboard dispatch_stall math_pipe_throttle no_instruction; do
    metrics+=("smsp__average_warps_issue_stalled_${stall}_per_issue_active.ratio")  # warps that wait, at each issue
  done
else
  pattern=hopper$module
  command=(benchmarks/compare_hopper.py "$case_name" --kernel "$kernel" --once)
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
fi
joined=$(IFS=,; echo "${metrics[*]}")
CUTE_DSL_LINEINFO=1 ncu --clock-control none --target-processes all --kernel-name "regex:$pattern" --launch-count 1 \
  --launch-skip 1 --set full --metrics "$joined" --import-source yes --force-overwrite --export "$report" \
  "$python" "${command[@]}" >/dev/null
ncu --import "$report.ncu-rep" --page raw --metrics "$joined" --print-units base
ncu --import "$report.ncu-rep" --page source --csv >"$report.csv"
"$python" benchmarks/stalls.py "$report.csv"
