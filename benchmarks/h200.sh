#!/usr/bin/env bash
# What is recorded of DDTREE in SGLang on one H200, in parts that take less than ten minutes each.
#
#     PYTHON=/opt/env/bin/python bash benchmarks/h200.sh PART OUT [PAIR]
#
# PYTHON has ddtoolkit[sglang] and pytest; TRAINER, by default the same, has torch and a site-packages of much
# Python text. PART is one of those below; OUT gets records and logs. `train` writes the larger pair into PAIR
# (/tmp/pair by default), which `few` and `profile` take. `tests`, `mla` and `train` judge and may run beside
# each other; the others time, and want the GPU to themselves. A step that fails or takes too long is told at
# the end, and the others still run.
set -uo pipefail
cd "$(dirname "$0")/.."

part=${1:?a part: tests, mla, train, overhead, few, attention or profile}
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
    tests)
        tests=("$python" -m pytest -q -p no:cacheprovider)
        step on_gpu 400 "${tests[@]}" tests/sglang/test_on_gpu.py &
        step gpu_tests 400 "${tests[@]}" tests/gpu tests/sglang/test_kernels_on_gpu.py
        wait
        ;;
    mla)
        common=(benchmarks/sglang_mla.py --set mem_fraction_static=0.9)
        step mla 480 "$python" "${common[@]}" --logs "$out/mla" --out "$out/sglang_h200_mla.json" &
        step mla_ep2 480 "$python" "${common[@]}" --tp 2 --ep 2 --one-gpu --levels 8 --prompts 8 \
            --logs "$out/mla_ep2" --out "$out/sglang_h200_mla_ep2.json"
        wait
        ;;
    train)
        step train 560 "${TRAINER:-$python}" -m benchmarks.sglang_large_pair --out "$pair" \
            --target-seconds 140 --drafter-seconds 90
        cp "$pair/record.json" "$out/pair.json"
        ;;
    overhead)
        step overhead 300 "$python" benchmarks/sglang_overhead.py --repeats 4 \
            --logs "$out/overhead" --out "$out/sglang_h200_overhead.json"
        ;;
    few)
        step few 500 "$python" benchmarks/sglang_modes.py --suite few --target "$pair/target" \
            --drafter "$pair/drafter" --token-prompts "$pair/prompts.json" --pair "$pair/record.json" \
            --levels 1,4 --tokens 256 --repeats 14 --logs "$out/few" --out "$out/sglang_h200_few.json"
        ;;
    attention)
        tune=("$python" benchmarks/tree_attention.py --tune --only)
        for case in 0 1 2 3 4; do # compile side by side, then time alone
            for shape in latent 7B; do
                timeout 140 "${tune[@]}" "$shape" --case "$case" > "$out/compile_$shape$case.log" 2>&1 &
            done
        done
        wait
        for shape in latent 7B; do
            step "tune_$shape" 80 "${tune[@]}" "$shape" --seconds 60 --out "$out/tree_attention_tune_$shape.json"
        done
        step tree_attention 70 "$python" benchmarks/tree_attention.py --seconds 60 \
            --out "$out/tree_attention_h200.json"
        ;;
    profile)
        step profile 200 "$python" benchmarks/sglang_profile.py --target "$pair/target" \
            --drafter "$pair/drafter" --token-prompts "$pair/prompts.json" --level 4 --tokens 1500 \
            --expansion transition --logs "$out/profile"
        ;;
    *)
        echo "$part is not a part: tests, mla, train, overhead, few, attention or profile" >&2
        exit 2
        ;;
esac

if [ -s "$out/failed" ]; then
    echo "failed: $(paste -sd ' ' "$out/failed")"
    exit 1
fi
