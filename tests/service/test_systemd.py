"""Rendered units, read back by a reader written from the man pages and checked by systemd itself."""

import re
import shutil
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import ConfigError
from toolkit.service.systemd import render_unit, verify_unit
from toolkit.service.unit import RestartPolicy, SecretSource, Unit

UNIT = Unit(
    name="stub",
    release="r",
    description="100% sure \\",
    argv=("/usr/bin/env", "-m"),
    environment={"A": "b"},
    working_directory="/var/cache/ddtoolkit/stub",
    host="127.0.0.1",
    port=1,
    user="daemon",
    cache="/var/cache/ddtoolkit/stub",
    load_timeout=1200.0,
    stop_timeout=120.0,
    restart=RestartPolicy(15.0, 3, 7200.0),
    limits={"memlock": None, "nofile": 1 << 20},
)

# What an argument or a value may be: anything but control characters, lone surrogates and noncharacters.
_NONCHARACTERS = {
    chr(code) for plane in range(17) for code in (plane * 0x10000 + 0xFFFE, plane * 0x10000 + 0xFFFF)
}
_NONCHARACTERS |= {chr(code) for code in range(0xFDD0, 0xFDF0)}
TEXT = st.text(
    st.one_of(
        st.sampled_from(list("$%\\\"'`;#*{}[]()<>|&!@:+-= \t/sntx0")),
        st.characters(exclude_categories=["Cc", "Cs"]),
    ).filter(lambda character: character not in _NONCHARACTERS)
)


def lines(text, key):
    """Values of `key`: systemd.syntax(7): one a line, white space around `=` and at the end is dropped."""
    found = []
    for line in text.split("\n"):
        assert not line.endswith("\\"), "a final backslash would join the next line"
        name, _, value = line.partition("=")
        if name == key:
            found.append(value.strip())
    return found


ESCAPES = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v",
    "\\": "\\", '"': '"', "'": "'", "s": " ",
}  # fmt: skip


def words(value):
    """systemd.syntax(7), "Quoting": words apart by white space, quotes around whole words, C escapes."""
    found, position = [], 0
    while position < len(value):
        if value[position] in " \t":
            position += 1
            continue
        word, quote = "", None
        if value[position] in "\"'":
            quote, position = value[position], position + 1
        while position < len(value):
            character = value[position]
            if character == "\\":
                word += ESCAPES[value[position + 1]]
                position += 2
                continue
            position += 1
            if quote is not None and character == quote:
                quote = None
                break
            if quote is None and character in " \t":
                break
            word += character
        assert quote is None, "a quote is not closed"
        found.append(word)
    return found


def specifiers(word):
    """systemd.unit(5), "Specifiers": %% is one percent sign; anything else would be replaced."""
    assert re.fullmatch(r"([^%]|%%)*", word, re.DOTALL), f"{word!r} holds a specifier"
    return word.replace("%%", "%")


def variables(word):
    """systemd.service(5), "Command lines": $$ is one dollar sign; $NAME and ${NAME} would be replaced."""
    assert re.fullmatch(r"([^$]|\$\$)*", word, re.DOTALL), f"{word!r} holds a variable"
    return word.replace("$$", "$")


def read_arguments(text):
    (value,) = lines(text, "ExecStart")
    return tuple(variables(specifiers(word)) for word in words(value))


def read_environment(text):
    pairs = [specifiers(word) for value in lines(text, "Environment") for word in words(value)]
    return dict(pair.split("=", 1) for pair in pairs)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXT, max_size=4), st.dictionaries(st.sampled_from(["A", "B_1"]), TEXT))
def test_arguments_and_environment_come_back_byte_for_byte(arguments, environment):
    """R1, R2, R3."""
    text = render_unit(replace(UNIT, argv=("/bin/x", *arguments), environment=environment), 252)
    assert read_arguments(text) == ("/bin/x", *arguments)
    assert read_environment(text) == {"LANG": "C.UTF-8", **environment}


@pytest.mark.parametrize(
    "word",
    [
        "%s",
        "100%FREE",
        "http://h/%s",
        "pa$1wor$D",
        "${HOME}",
        "$$",
        '{"a": "b c"}',
        ";",
        "",
        "a\tb",
        "\\",
        "# x",
        "*",
        "ü",
    ],
)
def test_known_troubles(word):
    text = render_unit(replace(UNIT, argv=("/bin/x", word), environment={"A": word}), 252)
    assert read_arguments(text) == ("/bin/x", word)
    assert read_environment(text)["A"] == word


def test_value_with_spaces_creates_no_second_variable():
    """R3."""
    value = "u?options=-c search_path=app"
    text = render_unit(replace(UNIT, environment={"U": value}), 252)
    assert read_environment(text) == {"LANG": "C.UTF-8", "U": value}


@settings(max_examples=100, deadline=None)
@given(TEXT)
def test_description_is_one_line(description):
    text = render_unit(replace(UNIT, description=description), 252)
    (value,) = lines(text, "Description")
    assert specifiers(value) == description.rstrip("\\").strip()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"argv": ("python",)}, "must be an absolute path"),
        ({"argv": ("/opt/$X/python",)}, "without \\$"),
        ({"argv": ("/x", "\ufffe")}, "noncharacter"),
        ({"environment": {"A": "\ufdd0"}}, "service.environment.A: .*noncharacter"),
        ({"working_directory": "/a b"}, "working_directory: '/a b' is no plain absolute path"),
        ({"cache": "relative"}, "cache"),
    ],
)
def test_what_a_unit_file_cannot_say_is_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        render_unit(replace(UNIT, **change), 252)


def section(text, name):
    return text.partition(f"[{name}]\n")[2].partition("\n[")[0]


def test_start_limit_is_in_the_unit_section_and_follows_the_policy():
    """R4."""
    text = render_unit(UNIT, 252)
    assert "StartLimitIntervalSec=7200000ms\nStartLimitBurst=3" in section(text, "Unit")
    assert "StartLimit" not in section(text, "Service")
    assert lines(text, "Restart") == ["on-failure"]
    assert lines(text, "RestartSec") == ["15000ms"]
    once = render_unit(replace(UNIT, restart=RestartPolicy(1, 1, 60)), 252)
    assert lines(once, "Restart") == ["no"]
    assert "StartLimit" not in once


def test_load_timeout_and_stop_timeout_are_the_units():
    """L1: never systemd's own 90 s."""
    text = render_unit(UNIT, 252)
    assert lines(text, "TimeoutStartSec") == ["1200000ms"]
    assert lines(text, "TimeoutStopSec") == ["120000ms"]
    assert lines(text, "KillMode") == ["mixed"]


def test_keys_newer_than_the_host_are_left_out_or_refused():
    """R5."""
    assert lines(render_unit(UNIT, 252), "ProtectClock") == ["yes"]
    old = render_unit(UNIT, 240)
    for key in ("ProtectClock", "ProtectKernelLogs", "RestrictSUIDSGID", "ProtectHostname"):
        assert key not in old
    assert lines(old, "ProtectSystem") == ["strict"]
    with pytest.raises(ConfigError, match="systemd 239 is too old: 240"):
        render_unit(UNIT, 239)
    secret = replace(UNIT, secrets={"api-key": SecretSource(env="K")}, secrets_file="/s.yaml")
    with pytest.raises(ConfigError, match="secrets need systemd 247"):
        render_unit(secret, 246)


def test_secret_is_handed_over_as_a_credential():
    """R6: the file in the state folder is root's; the service gets a copy under its own name."""
    path = "/var/lib/ddtoolkit/state/stub/secrets/r.yaml"
    secret = replace(
        UNIT,
        argv=("/bin/x", "--config", path, "--last", "$X"),
        secrets={"api-key": SecretSource(env="K")},
        secrets_file=path,
    )
    text = render_unit(secret, 252)
    assert lines(text, "LoadCredential") == [f"config.yaml:{path}"]
    (value,) = lines(text, "ExecStart")
    assert words(value) == ["/bin/x", "--config", "${CREDENTIALS_DIRECTORY}/config.yaml", "--last", "$$X"]


def test_hardening_keeps_the_gpu_visible():
    """H1, H2."""
    text = render_unit(replace(UNIT, gpus=8, nvlink=True), 252)
    for key in ("PrivateDevices", "DevicePolicy", "MemoryDenyWriteExecute"):
        assert key not in text
    assert lines(text, "LimitMEMLOCK") == ["infinity"]
    assert lines(text, "LimitNOFILE") == ["1048576"]
    assert "AF_NETLINK" in text
    assert "Requires=nvidia-fabricmanager.service" in section(text, "Unit")
    assert "nvidia-persistenced.service" in section(text, "Unit")
    assert "fabricmanager" not in render_unit(replace(UNIT, gpus=8), 252)
    assert "nvidia" not in render_unit(UNIT, 252)
    assert lines(text, "CacheDirectory") == ["ddtoolkit/stub"]
    assert lines(text, "User") == ["daemon"]


def test_engine_in_a_home_folder_stays_readable():
    assert lines(render_unit(UNIT, 252), "ProtectHome") == ["yes"]
    home = replace(UNIT, argv=("/home/u/env/bin/python",))
    assert lines(render_unit(home, 252), "ProtectHome") == ["read-only"]


needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


@needs_systemd
def test_systemd_itself_has_nothing_to_say():
    """R4, with every key in use and every awkward word."""
    path = "/var/lib/ddtoolkit/state/stub/secrets/r.yaml"
    unit = replace(
        UNIT,
        argv=("/usr/bin/env", "--config", path, "%s", "$X", ";", "", "\t", "\\", '"', "ü", "'"),
        environment={"A": "100%FREE $X \\ \" '", "B": ""},
        secrets={"api-key": SecretSource(env="K")},
        secrets_file=path,
        gpus=8,
    )
    assert verify_unit(render_unit(unit, 252), "stub") == ()


@needs_systemd
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("KillMode=mixed", "KillMode=mixed\nRestartSteps=3x\nNoSuchKey=1", "NoSuchKey"),
        ("/usr/bin/env", "/no/such/program", "/no/such/program"),
        ("[Unit]\n", "[Unit]\nRestartSec=3\n", "RestartSec"),
    ],
)
def test_what_systemd_says_about_the_unit_is_told(old, new, said):
    """R4: although its exit status is 0 for most of it."""
    text = render_unit(UNIT, 252)
    assert old in text
    assert said in "\n".join(verify_unit(text.replace(old, new, 1), "stub"))


def test_engine_behind_a_link_into_a_home_folder_stays_readable(tmp_path):
    link = tmp_path / "python"
    link.symlink_to("/home/u/.pyenv/bin/python")
    assert lines(render_unit(replace(UNIT, argv=(str(link),)), 252), "ProtectHome") == ["read-only"]


def test_engine_in_a_temporary_folder_stays_visible():
    assert lines(render_unit(UNIT, 252), "PrivateTmp") == ["yes"]
    temporary = replace(UNIT, argv=("/tmp/env/bin/python",))
    assert lines(render_unit(temporary, 252), "PrivateTmp") == ["no"]
