"""Rules across keys: each refuses or warns of its combination, at the key to change, and of nothing else."""

import pytest

from toolkit.errors import ConfigError
from toolkit.profile.loading import load_profile
from toolkit.profile.rules import warnings

EMBEDDED = """\
name: a
model: {drafter: {source: bundled}}
"""
SGLANG = """\
name: a
hardware: {device: cuda, count: 8, compute_capability: 12.0, interconnect: pcie}
host: {user: ddtree}
engine: {kind: sglang, version: 0.5.17, dtype: bfloat16, attention_backend: triton}
model:
  target: {source: /models/kimi, revision: abc}
  drafter: {source: /models/kimi-dflash}
parallelism: {tp: 8, ep: 8}
speculative: {budget: 32}
service: {manager: systemd, load_timeout: 20m, restart: {interval: 2h}}
"""
KEYS = ["service.api_key={env: A}", "service.admin_api_key={env: B}"]


def findings(tmp_path, text, sets):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    try:
        return [], list(load_profile(str(path), sets=sets).warnings)
    except ConfigError as error:
        return error.problems, []


@pytest.mark.parametrize("text", [EMBEDDED, SGLANG, EMBEDDED + "speculative: {expansion: transition}\n"])
def test_sound_profiles_have_no_findings(tmp_path, text):
    assert findings(tmp_path, text, []) == ([], [])


@pytest.mark.parametrize(
    ("text", "sets", "key", "message"),
    [
        (EMBEDDED, ["speculative.budget=6"], "speculative.budget", "below block_size - 1 = 7"),
        (EMBEDDED, ["model.drafter=null"], "model.drafter", "DDTREE drafts with a DFlash drafter"),
        (
            EMBEDDED,
            ["model.drafter=null", "speculative.algorithm=DFLASH"],
            "model.drafter",
            "DFLASH drafts with a DFlash drafter",
        ),
        (
            EMBEDDED,
            ["model.context_length=16", "speculative.block_size=16"],
            "model.context_length",
            "no room for a drafted block of 16",
        ),
        (EMBEDDED, ["model.target.source=/m"], "model.drafter.source", "belongs to the target"),
        (EMBEDDED, ["model.drafter.source=/m"], "model.drafter.source", "belongs to the target"),
        (EMBEDDED, ["model.target.revision=x"], "model.target.revision", "has no revisions"),
        (EMBEDDED, ["model.trust_remote_code=true"], "model.trust_remote_code", "runs no code"),
        (EMBEDDED, ["hardware.count=1"], "hardware.count", "the device is cpu"),
        (EMBEDDED, ["hardware.gpu=H200"], "hardware.gpu", "the device is cpu"),
        (EMBEDDED, ["hardware.interconnect=nvlink"], "hardware.interconnect", "the device is cpu"),
        (EMBEDDED, ["hardware.device=cuda"], "hardware.count", "at least one GPU"),
        (EMBEDDED, ["hardware.device=cuda", "hardware.count=2"], "hardware.count", "one GPU at most, not 2"),
        (EMBEDDED, ["parallelism.tp=2"], "parallelism.tp", "does not spread a model"),
        (EMBEDDED, ["parallelism.ep=2"], "parallelism.ep", "does not spread a model"),
        (EMBEDDED, ["engine.version=0.5.17"], "engine.version", "engine.kind sglang only"),
        (EMBEDDED, ["engine.attention_backend=fa3"], "engine.attention_backend", "engine.kind sglang only"),
        (EMBEDDED, ["host.user=ddtree"], "host.user", "is for the systemd manager"),
        (EMBEDDED, ["service.bind=0.0.0.0"], "service.bind", "no api_key and no admin_api_key"),
        (EMBEDDED, ["service.bind=::", KEYS[0]], "service.bind", "there is no admin_api_key"),
        (EMBEDDED, ["service.bind=10.0.0.1", KEYS[1]], "service.bind", "there is no api_key"),
        (EMBEDDED, ["service.environment={A-B: x}"], "service.environment.A-B", "is no name"),
        (
            EMBEDDED,
            ["service.restart.interval=455s"],
            "service.restart.interval",
            "not above burst x (load_timeout + delay) = 5 x (90s + 1s)",
        ),
        (
            EMBEDDED,
            ["acceptance.concurrency=20", "service.max_running_requests=16", "service.max_queued_requests=3"],
            "acceptance.concurrency",
            "the server takes 19",
        ),
        (
            EMBEDDED,
            ["acceptance.min_acceptance_length=8.5"],
            "acceptance.min_acceptance_length",
            "8.5 cannot be reached",
        ),
        (EMBEDDED, ["engine.extra_args=[--port, '80']"], "engine.extra_args[0]", "--port is written from"),
        (
            EMBEDDED,
            ["engine.extra_args=[--shutdown-timeout=1]"],
            "engine.extra_args[0]",
            "service.stop_timeout",
        ),
        (EMBEDDED, ["engine.extra_args=[--port=80]"], "engine.extra_args[0]", "--port is written from"),
        (
            EMBEDDED,
            ["engine.extra_args=[--x, --speculative-ddtree-bud, '3']"],
            "engine.extra_args[1]",
            "written from speculative.budget",
        ),
        (SGLANG, ["engine.version=null"], "engine.version", "needs a pinned version"),
        (SGLANG, ["engine.threads=4"], "engine.threads", "embedded engine only"),
        (
            SGLANG,
            ["model.trust_remote_code=true", "model.target.revision=null"],
            "model.trust_remote_code",
            "pinned",
        ),
        (SGLANG, ["model.drafter.source=bundled"], "model.drafter.source", "for the embedded engine"),
        (SGLANG, ["parallelism.pp=2", "parallelism.tp=4", "parallelism.ep=4"], "parallelism.pp", "pipeline"),
        (
            SGLANG,
            ["speculative.algorithm=DFLASH", "parallelism.dp_attention=true"],
            "parallelism.dp_attention",
            "DFLASH does not run with data-parallel attention",
        ),
        (SGLANG, ["parallelism.tp=16"], "parallelism.tp", "16 x 1 needs more than the 8 GPUs"),
        (SGLANG, ["parallelism.ep=3"], "parallelism.ep", "ep = 3 does not divide tp = 8"),
        (
            SGLANG,
            ["engine.attention_backend=trtllm_mla", "hardware.compute_capability=10.3"],
            "engine.attention_backend",
            "DDTREE cannot verify with trtllm_mla: it has no tree masks",
        ),
        (
            SGLANG,
            ["engine.attention_backend=cutlass_mla", "hardware.compute_capability=10.3"],
            "engine.attention_backend",
            "as if the tree were a chain",
        ),
        (
            SGLANG,
            ["engine.attention_backend=fa3", "speculative.algorithm=DFLASH"],
            "engine.attention_backend",
            "Hopper",
        ),
        (
            SGLANG,
            ["engine.attention_backend=fa3", "hardware.compute_capability=9.0"],
            "engine.attention_backend",
            "not proven with DDTREE",
        ),
        (SGLANG, ["host.root=/srv"], "host.root", "owned by root"),
        (SGLANG.replace("name: a", "name: recover"), [], "name", "the toolkit's own unit"),
        (SGLANG, ["host.user=root"], "host.user", "must not run as root"),
        (SGLANG, ["engine.extra_args=[--api-key, k]"], "engine.extra_args[0]", "set service.api_key"),
        (
            SGLANG,
            ["engine.extra_args=[--speculative-num-draft-tokens, '8']"],
            "engine.extra_args",
            "8 is not the verify width, budget + 1 = 33",
        ),
        (
            SGLANG,
            ["engine.extra_args=[--speculative-accept-threshold-single=0.9]"],
            "engine.extra_args[0]",
            "changes the distribution",
        ),
        (
            SGLANG,
            ["engine.extra_args=[--disaggregation-mode, prefill]"],
            "engine.extra_args[0]",
            "does not go with DDTREE",
        ),
    ],
)
def test_refused(tmp_path, text, sets, key, message):
    problems, _ = findings(tmp_path, text, sets)
    assert [problem.key for problem in problems] == [key]
    assert message in str(problems[0])


def test_sglang_needs_gpus(tmp_path):
    text = SGLANG.replace(
        "device: cuda, count: 8, compute_capability: 12.0, interconnect: pcie", "device: cpu"
    )
    problems, _ = findings(tmp_path, text, [])
    assert [(problem.key, problem.message) for problem in problems] == [
        ("hardware.device", "sglang needs GPUs")
    ]


@pytest.mark.parametrize(
    ("text", "sets", "key", "message"),
    [
        (EMBEDDED, ["speculative.topk_cap=17"], "speculative.topk_cap", "more than the 16 nodes"),
        (EMBEDDED, ["speculative.topk_cap=1"], "speculative.budget", "9 are padding"),
        (EMBEDDED, ["speculative.expansion=chain"], "speculative.budget", "expansion is chain"),
        (
            EMBEDDED,
            ["service.bind=0.0.0.0", "service.allow_unauthenticated=true"],
            "service.bind",
            "anyone who reaches it can use the server",
        ),
        (
            EMBEDDED,
            ["service.environment.MY_SECRET=x"],
            "service.environment.MY_SECRET",
            "looks like a secret",
        ),
        (
            EMBEDDED,
            ["service.environment.NCCL_P2P_DISABLE=1"],
            "service.environment.NCCL_P2P_DISABLE",
            "peer-to-peer",
        ),
        (EMBEDDED, ["acceptance.concurrency=17"], "acceptance.concurrency", "the rest wait"),
        (
            EMBEDDED,
            ["speculative.algorithm=NONE", "acceptance.min_acceptance_length=2"],
            "acceptance.min_acceptance_length",
            "no meaning",
        ),
        (SGLANG, ["parallelism.tp=4", "parallelism.ep=4"], "parallelism.tp", "leaves GPUs of the 8 unused"),
        (
            SGLANG,
            ["engine.max_graph_batch=8"],
            "engine.max_graph_batch",
            "below max_running_requests = 16",
        ),
    ],
)
def test_warned(tmp_path, text, sets, key, message):
    problems, warnings = findings(tmp_path, text, sets)
    assert problems == []
    assert [warning.key for warning in warnings] == [key]
    assert message in str(warnings[0])


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        (EMBEDDED, ["speculative.budget=7", "speculative.topk_cap=1"]),
        (EMBEDDED, ["speculative.algorithm=DFLASH", "speculative.budget=1", "speculative.topk_cap=1"]),
        (
            EMBEDDED,
            [
                "speculative.algorithm=NONE",
                "model.drafter=null",
                "speculative.budget=1",
                "speculative.topk_cap=1",
            ],
        ),
        (EMBEDDED, ["service.bind=::1"]),
        (EMBEDDED, ["service.bind=127.3.4.5"]),
        (EMBEDDED, ["service.bind=0.0.0.0", *KEYS]),
        (EMBEDDED, ["service.restart.burst=0", "service.restart.interval=1s"]),
        (EMBEDDED, ["service.environment.NCCL_P2P_DISABLE=0"]),
        (EMBEDDED, ["engine.extra_args=[--log-level, debug, -v, --]"]),
        (
            SGLANG,
            [
                "speculative.algorithm=NONE",
                "engine.attention_backend=trtllm_mla",
                "hardware.compute_capability=10.3",
            ],
        ),
        (
            SGLANG,
            [
                "engine.attention_backend=fa3",
                "hardware.compute_capability=9.0",
                "speculative.algorithm=DFLASH",
            ],
        ),
        (SGLANG, ["engine.extra_args=[--speculative-num-draft-tokens=33, --disaggregation-mode, 'null']"]),
        (SGLANG, ["parallelism.tp=16", "parallelism.ep=16", "engine.extra_args=[--nnodes, '2']"]),
    ],
)
def test_not_disturbed(tmp_path, text, sets):
    assert findings(tmp_path, text, sets) == ([], [])


def test_warnings_of_a_stored_profile(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(EMBEDDED + "service: {bind: 0.0.0.0, allow_unauthenticated: true}\n")
    (warning,) = warnings(load_profile(str(path)).profile)
    assert str(warning).startswith("service.bind: 0.0.0.0 is reached from other machines")


def test_an_argument_that_holds_a_key_is_not_shown(tmp_path):
    problems, _ = findings(tmp_path, SGLANG, ["engine.extra_args=[--api-key=sk-hidden]"])
    assert "sk-hidden" not in str(problems)


def test_a_wrong_key_hides_no_rule_and_invents_none(tmp_path):
    text = EMBEDDED + "speculative: {budget: x, block_size: 32}\nhardware: {count: 4}\nservice: {port: y}\n"
    problems, _ = findings(tmp_path, text, [])
    assert [problem.key for problem in problems] == ["speculative.budget", "hardware.count", "service.port"]
