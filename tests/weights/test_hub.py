"""A model hub's API, spoken by a real server: commits, hashes, redirects, tokens."""

import pytest

from tests.weights.checkpoints import contents
from tests.weights.server import COMMIT, publishing
from toolkit.errors import ToolkitError
from toolkit.weights import work
from toolkit.weights.store import read_marker

SOURCE = f"hf://org/model@{COMMIT}"
NAME = f"org--model@{COMMIT}"
FIRST = "model-00001-of-00003.safetensors"


def test_a_repository_arrives_at_its_commit_without_what_no_engine_reads(fetch, published, models, said):
    (published / "pytorch_model.bin").write_bytes(b"pickle")
    (published / ".gitattributes").write_text("x")
    (published / "README.md").write_text("x")
    (published / "original").mkdir()
    (published / "original" / "consolidated.safetensors").write_bytes(b"x")
    (published / "modeling.py").write_text("x = 1\n")
    fetch(SOURCE, None)
    folder = models / NAME
    wanted = contents(published)
    for name in ("pytorch_model.bin", ".gitattributes", "README.md", "original/consolidated.safetensors"):
        del wanted[name]
    assert contents(folder) == wanted
    assert read_marker(folder).revision == COMMIT
    assert any(line.startswith("not fetched: ") and "pytorch_model.bin" in line for line in said)


def test_files_outside_large_file_storage_are_checked_by_git_too(fetch, server, models):
    server.faults.flip, server.faults.flips = {"config.json": 3}, 9
    with pytest.raises(ToolkitError, match=r"config\.json: its git hash is \w+, not \w+ as listed"):
        fetch(SOURCE, None)


def test_a_repository_of_pickles_is_refused(fetch, published):
    for path in published.glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))
    with pytest.raises(ToolkitError, match=r"hf://org/model@\w+ has no \.safetensors file") as caught:
        fetch(SOURCE, None)
    assert "pickled" in caught.value.hint


def test_another_commit_than_the_pinned_one_is_refused(fetch, monkeypatch):
    other = {"sha": "f" * 40, "siblings": []}
    monkeypatch.setattr("tests.weights.server.hub_answer", lambda folder, revision: other)
    with pytest.raises(ToolkitError, match=f"gives commit {'f' * 40} of org/model, not {COMMIT}"):
        fetch(SOURCE, None)


def test_a_revision_that_is_not_there_is_named(fetch, server):
    with pytest.raises(ToolkitError, match=rf"{server.url}/api/models/org/model/revision/other.*HTTP 404"):
        fetch("hf://org/model@other", None)


def test_what_is_no_hub_is_told(fetch, server, published, monkeypatch):
    monkeypatch.setattr("tests.weights.server.hub_answer", lambda folder, revision: {"models": []})
    with pytest.raises(ToolkitError, match="does not answer as a model hub does"):
        fetch(SOURCE, None)


def test_the_token_goes_to_the_hub_and_never_to_where_it_redirects(
    fetch, server, published, models, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.faults.token = "hf_secret"
    with publishing(published) as elsewhere:
        server.faults.redirect = elsewhere.url
        fetch(SOURCE, None)
        assert contents(models / NAME) == contents(published)
        assert server.headers[f"/org/model/resolve/{COMMIT}/{FIRST}"]["Authorization"] == "Bearer hf_secret"
        assert "Authorization" not in elsewhere.headers[f"/folder/{FIRST}"]


def test_the_token_stays_on_a_redirect_within_the_hub(fetch, server, models, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.faults.token = "hf_secret"
    server.faults.redirect = server.url
    fetch(SOURCE, None)
    assert (models / NAME / FIRST).is_file()


def test_a_gated_repository_says_where_the_token_goes(fetch, server, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    server.faults.token = "hf_secret"
    with pytest.raises(ToolkitError, match="HTTP 401") as caught:
        fetch(SOURCE, None)
    assert "HF_TOKEN" in caught.value.hint
    (tmp_path / "token").write_text("hf_secret\n")
    fetch(SOURCE, None)


def test_a_redirect_out_of_tls_is_refused(fetch, server, models):
    server.faults.redirect = "http://192.0.2.1"
    with pytest.raises(ToolkitError, match=r"redirects to http://192\.0\.2\.1/folder/.*, which is not HTTPS"):
        fetch(SOURCE, None)


def test_a_break_after_a_redirect_asks_the_hub_again(fetch, server, published, models):
    with publishing(published) as elsewhere:
        server.faults.redirect = elsewhere.url
        elsewhere.faults.cuts.update({FIRST: 2})
        fetch(SOURCE, None)
    assert (models / NAME / FIRST).read_bytes() == (published / FIRST).read_bytes()
    ranges = [range_ for _, path, range_ in server.asked if path.endswith(FIRST)]
    assert ranges == [None, "bytes=1000-", "bytes=2000-"]


def test_a_branch_is_resolved_and_never_kept_under_its_name(server, models):
    asked = {"source": "hf://org/model@main", "endpoint": server.url, "root": str(models.parent)}
    with pytest.raises(ToolkitError, match="hf://org/model@main moves: name its commit"):
        work.add(asked, print)
    assert work.resolve(asked, print)["commit"] == COMMIT
