"""Prometheus text, as servers write it."""

from toolkit.acceptance.metrics import COUNTERS, GAUGES, parse_metrics, pick

SGLANG = """\
# HELP sglang:num_requests_total Number of requests processed.
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{model_name="a b",note="x} 9"} 3.0
sglang:num_requests_total{model_name="c"} 4.0 1395066363000
sglang:generation_tokens_total 1.5e+03
sglang:num_running_reqs{tp_rank="0"} 2
sglang:gen_throughput NaN
sglang:e2e_request_latency_seconds_bucket{le="+Inf"} +Inf
not a sample
broken{ 1
"""


def test_values_are_summed_over_label_sets():
    values = parse_metrics(SGLANG)
    assert values["sglang:num_requests_total"] == 7
    assert values["sglang:generation_tokens_total"] == 1500
    assert "sglang:gen_throughput" not in values
    assert "sglang:e2e_request_latency_seconds_bucket" not in values


def test_names_are_ours():
    values = parse_metrics(SGLANG)
    assert pick(values, COUNTERS) == {"requests": 7, "completion_tokens": 1500}
    assert pick(values, GAUGES) == {"running": 2}
    assert pick({}, COUNTERS) == {}


def test_vllm_names():
    text = 'vllm:request_success_total{finished_reason="length"} 2\nvllm:spec_decode_num_drafts_total 5\n'
    assert pick(parse_metrics(text), COUNTERS) == {"requests": 2, "verify_steps": 5}
