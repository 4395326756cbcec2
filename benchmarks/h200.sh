#!/usr/bin/env bash
# What is recorded of DDTREE in SGLang on one H200, in three parts of less than ten minutes each.
#
#     PYTHON=/opt/env/bin/python bash benchmarks/h200.sh PART OUT [PAIR]
#
# PYTHON has ddtoolkit[sglang] and pytest. PART is attention, parallel or pair; OUT gets records and logs.
# `parallel` begins to train the larger pair in PAIR (/tmp/pair by default) and leaves that running; `pair`
# waits for it. A step that fails or takes too long is told at the end, and the others still run.
set -uo pipefail
cd "$(dirname "$0")/.."

part=${1:?attention, parallel or pair}
out=$(realpath -m "${2:?a folder for records and logs}")
pair=${3:-/tmp/pair}
python=${PYTHON:-python3}
mkdir -p "$out"
: > "$out/failed"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# step NAME SECONDS COMMAND...: run it for no longer, its words into NAME.log
step() {
    local name=$1 limit=$2 begin=$SECONDS status=0
    shift 2
    timeout --kill-after=20 "$limit" "$@" > "$out/$name.log" 2>&1 || status=$?
    if [ "$status" != 0 ]; then
        echo "$name" >> "$out/failed"
        tail -n 8 "$out/$name.log"
    fi
    echo "$name: status $status after $((SECONDS - begin)) s"
}

case $part in
    attention) # alone on the GPU: what is timed here may not be disturbed
        step gpu_tests 150 "$python" -m pytest -q -p no:cacheprovider tests/gpu tests/sglang/test_kernels_on_gpu.py
        step tree_attention 170 "$python" benchmarks/tree_attention.py --tune --seconds 150 \
            --out "$out/tree_attention_h200.json"
        step overhead 280 "$python" benchmarks/sglang_overhead.py --repeats 2 \
            --logs "$out/overhead" --out "$out/sglang_h200_overhead.json"
        ;;
    parallel) # verdicts, not times: they may run side by side
        setsid nohup "$python" -m benchmarks.sglang_large_pair --out "$pair" --target-seconds 150 \
            --drafter-seconds 90 > "$out/train.log" 2>&1 &
        step mla 260 "$python" benchmarks/sglang_mla.py --set mem_fraction_static=0.8 \
            --logs "$out/mla" --out "$out/sglang_h200_mla.json" &
        step mla_ep2 330 "$python" benchmarks/sglang_mla.py --tp 2 --ep 2 --one-gpu --levels 1,8 \
            --set mem_fraction_static=0.8 --logs "$out/mla_ep2" --out "$out/sglang_h200_mla_ep2.json" &
        wait %2 %3
        step on_gpu 200 "$python" -m pytest -q -p no:cacheprovider tests/sglang/test_on_gpu.py
        ;;
    pair)
        for _ in $(seq 200); do
            [ -e "$pair/record.json" ] && break
            sleep 1
        done
        cp "$pair/record.json" "$out/pair.json" || exit 1
        step few 420 "$python" benchmarks/sglang_modes.py --suite few --target "$pair/target" \
            --drafter "$pair/drafter" --token-prompts "$pair/prompts.json" --pair "$pair/record.json" \
            --levels 1,4 --tokens 256 --repeats 25 --logs "$out/few" --out "$out/sglang_h200_few.json"
        step profile 150 "$python" benchmarks/sglang_profile.py --target "$pair/target" \
            --drafter "$pair/drafter" --token-prompts "$pair/prompts.json" --level 4 --tokens 1500 --expansion transition \
            --logs "$out/profile"
        ;;
    *)
        echo "$part is not a part: attention, parallel or pair" >&2
        exit 2
        ;;
esac

if [ -s "$out/failed" ]; then
    echo "failed: $(paste -sd ' ' "$out/failed")"
    exit 1
fi
