"""Settings files, and settings from a profile."""

import json

import pytest

from toolkit.acceptance import load_settings, settings_for
from toolkit.errors import ConfigError
from toolkit.profile.schema import Profile


def profile(**sections):
    return Profile.model_validate({"schema": 1, "name": "p", **sections})


def test_from_a_profile():
    settings = settings_for(
        profile(
            acceptance={"min_acceptance_length": 2.5, "tolerance": 0.2, "time_limit": "90s", "requests": 200},
            speculative={"budget": 32, "block_size": 8},
            service={"port": 4321},
        )
    )
    assert settings.url == "http://127.0.0.1:4321"
    assert (settings.min_acceptance_length, settings.tolerance, settings.time_limit) == (2.5, 0.2, 90)
    assert (settings.algorithm, settings.budget, settings.block_size) == ("DDTREE", 32, 8)
    assert (settings.requests, settings.dtype) == (200, "float32")
    assert {"lossless", "lossless_control", "real_tokens", "many_requests"} == set(settings.required)


def test_experiments_need_no_proof_of_what_they_may_break():
    settings = settings_for(profile(), mode="experiment")
    assert set(settings.required) == {"real_tokens", "many_requests"}


def test_without_speculation_nothing_about_it_is_asked():
    settings = settings_for(
        profile(speculative={"algorithm": "NONE"}, acceptance={"min_acceptance_length": 3})
    )
    assert set(settings.required) == {"real_tokens", "many_requests"}
    assert settings.min_acceptance_length is None


@pytest.mark.parametrize(
    ("bind", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:30000"),  # noqa: S104
        ("::", "http://[::1]:30000"),
        ("10.0.0.7", "http://10.0.0.7:30000"),
    ],
)
def test_the_bind_address_is_reached(bind, url):
    assert settings_for(profile(service={"bind": bind})).url == url


def test_keys_stay_references():
    one = profile(service={"api_key": {"file": "/etc/key"}})
    assert settings_for(one).model_dump(mode="json")["api_key"]["file"] == "/etc/key"
    handed = settings_for(one, keys_from_environment=True)
    assert handed.api_key.env == "DDTOOLKIT_API_KEY"
    assert handed.admin_api_key is None


def test_round_trip_through_a_file(tmp_path):
    settings = settings_for(profile(), base_reports=[tmp_path / "b.json"])
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(settings.model_dump(mode="json")))
    assert load_settings(path) == settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('"x"', "valid dictionary"),
        ('{"url": ""}', "url"),
        ('{"url": "http://h", "requests": 150}', "requests"),
        ('{"url": "http://h", "colour": 1}', "colour"),
        ('{"url": "http://h", "tolerance": NaN}', "tolerance"),
        ("{}", "url"),
    ],
)
def test_bad_settings_are_named(tmp_path, text, words):
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_settings(tmp_path / "none.json")
