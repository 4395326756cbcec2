"""Sources as they are written."""

import pytest

from toolkit.profile.source import Source, is_remote, parse, trustworthy

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "revision", "wanted"),
    [
        (f"hf://org/m.1@{COMMIT}", None, Source("hf", "org/m.1", "org--m.1", COMMIT)),
        ("hf://org/m", COMMIT, Source("hf", "org/m", "org--m", COMMIT)),
        (f"hf://org/m@{COMMIT}", COMMIT, Source("hf", "org/m", "org--m", COMMIT)),
        ("hf://gpt2@refs/pr/1", None, Source("hf", "gpt2", "gpt2", "refs/pr/1")),
        ("https://h/a/kimi", "v1", Source("https", "https://h/a/kimi/", "kimi", "v1")),
        ("http://127.0.0.1:8/kimi/", "v1", Source("https", "http://127.0.0.1:8/kimi/", "kimi", "v1")),
        ("peer://ct200/kimi@v1", None, Source("peer", "ct200", "kimi", "v1")),
        ("peer://ct200/kimi/", "v1", Source("peer", "ct200", "kimi", "v1")),
    ],
)
def test_what_is_written_is_understood(text, revision, wanted):
    assert parse(text, revision) == wanted
    assert is_remote(text)


@pytest.mark.parametrize(
    ("text", "revision", "why"),
    [
        ("hf://org/m", None, "needs a revision"),
        (f"hf://org/m@{COMMIT}", "other", "names revision"),
        ("hf://a/b/c@main", None, "names no repository"),
        ("hf://../m@main", None, "names no repository"),
        ("hf://org/m@../..", None, "names no revision"),
        ("https://h/kimi/", None, "needs a revision"),
        ("https://h/kimi/", "../x", "has revision"),
        ("https://h/", "v1", "ends with no name"),
        ("https://h/..", "v1", "ends with no name"),
        ("https://h/a%2f..", "v1", "ends with no name"),
        ("https://user:secret@h/kimi/", "v1", "more than host and path"),
        ("https://h/kimi/?token=x", "v1", "more than host and path"),
        ("https://h:99999/kimi/", "v1", "is no URL"),
        ("http://h/kimi/", "v1", "is no https:// URL"),
        ("http://127.0.0.1.example/kimi/", "v1", "is no https:// URL"),
        ("peer://ct200/", "v1", "names no checkpoint"),
        ("peer://ct200/a/b@v1", None, "names no checkpoint"),
    ],
)
def test_what_is_wrong_is_told(text, revision, why):
    with pytest.raises(ValueError, match=why) as caught:
        parse(text, revision)
    assert "secret" not in str(caught.value)


def test_only_a_commit_pins_a_repository():
    assert parse(f"hf://org/m@{COMMIT}").pinned
    assert not parse("hf://org/m@main").pinned


def test_plain_http_is_for_this_machine_alone():
    assert trustworthy("http://[::1]:8/x")
    assert not trustworthy("http://192.0.2.1/x")
    assert not trustworthy("ftp://127.0.0.1/x")
    assert not trustworthy("file:///etc/passwd")
