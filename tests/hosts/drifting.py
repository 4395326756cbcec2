"""What hands may change on a deployed host, in rounds, and what the next deploy does about each round."""

from dataclasses import dataclass

NAME = "systemd-cpu"
BASE = f"/opt/ddtoolkit/services/{NAME}"
CURRENT = f"$(readlink -f {BASE}/current)"
ENVIRONMENT = "$(ls -d /opt/ddtoolkit/envs/*)"
CACHE = f"/var/cache/ddtoolkit/{NAME}"
SECRETS = f"/var/lib/ddtoolkit/state/{NAME}/secrets"
SERVICE = f"ddtoolkit-{NAME}.service"
UNIT = f"/etc/systemd/system/{SERVICE}"
RECOVER = "ddtoolkit-recover.service"
DROP_IN = f"{UNIT}.d/hands.conf"
RELOAD = "systemctl daemon-reload"


@dataclass(frozen=True)
class Case:
    """One drift.

    Attributes:
        name: of the test.
        make: shell text that makes it, as root on the host.
        subject: what it is about; a shell word that is read before it is made.
        found: a part of what is said.
        expected: a part of what should be there.
        seen: a part of what is there.
        kind: of the drift.
    """

    name: str
    make: str
    subject: str
    found: str
    expected: str
    seen: str
    kind: str = "files"


@dataclass(frozen=True)
class Round:
    """Drifts that are made side by side, and what the deploy does about them.

    Attributes:
        name: of the tests.
        cases: the drifts.
        steps: the plan's steps.
        restarts: whether the server is another process afterwards.
        releases: whether the release is another one afterwards.
        by_hand: what ends them where no deploy does; shell text.
    """

    name: str
    cases: tuple[Case, ...]
    steps: tuple[str, ...] = ()
    restarts: bool = False
    releases: bool = False
    by_hand: str = ""


def _mode(path: str, mode: str, expected: str, kind: str = "files") -> Case:
    seen = f"mode {mode}"
    return Case(f"mode of {path}", f"chmod {mode} {path}", path, seen, f"mode {expected}", seen, kind)


def _owner(path: str, kind: str = "files", expected: str = "root", seen: str = "deploy") -> Case:
    make = f"chown {seen} {path}"
    return Case(f"owner of {path}", make, path, f"not to {expected}", expected, seen, kind)


ROUNDS = (
    Round(
        "folders and packages",
        (
            _mode("/opt/ddtoolkit/envs", "0777", "0755", "host"),
            _mode("/var/lib/ddtoolkit/state", "0755", "0700", "host"),
            _owner(BASE, "host"),
            _owner("/var/log/ddtoolkit", "host"),
            _owner(CACHE, "host", "ddtoolkit", "root"),
            Case(
                "a folder is gone", "rmdir /var/lib/ddtoolkit/models", "/var/lib/ddtoolkit/models",
                "is missing", "a folder", "nothing", "host",
            ),
            Case(
                "a package is gone", "dpkg --force-hold -r drift-removed", "drift-removed",
                "is missing", "1.0", "not installed", "host",
            ),
            Case(
                "a package is not held", "apt-mark unhold drift-unheld", "drift-unheld",
                "not held", "hold", "install", "host",
            ),
            Case(
                "an upgraded package is not held", "true", "drift-upgraded",
                "not held", "hold", "install", "host",
            ),
            Case(
                "a package is another version",
                "dpkg -i /repository/drift-upgraded_2.0.deb", "drift-upgraded",
                "is 2.0, pinned is 1.0", "1.0", "2.0", "host",
            ),
        ),
        steps=("provision",),
    ),
    Round(
        "modes and owners",
        (
            _mode(UNIT, "0666", "0644", "unit"),
            _mode(f"{CURRENT}/unit.json", "0666", "0644"),
            _owner(f"{CURRENT}/profile.json"),
            _mode(f"{ENVIRONMENT}/environment.json", "0664", "0644"),
            _owner(f"{ENVIRONMENT}/toolkit/layout.py"),
            _mode(f"$(ls {SECRETS}/*)", "0644", "0600"),
            Case(
                "a stranger in the cache", f"touch {CACHE}/stranger", f"{CACHE}/stranger",
                "belongs to root, not to ddtoolkit", "ddtoolkit", "root",
            ),
            Case(
                "not started at boot", f"systemctl -q disable {SERVICE}", SERVICE,
                "is not started at boot", "enabled", "disabled", "unit",
            ),
            Case(
                "no recovery at boot", f"systemctl -q disable {RECOVER}", RECOVER,
                "is not run at boot", "enabled", "not run at boot", "unit",
            ),
            Case(
                "restarted with systemctl", f"systemctl restart {SERVICE}; {{wait}}", NAME,
                "started again by other means", "the last start by this tool", "other means", "unit",
            ),
        ),
        steps=("repair",),
    ),
    Round(
        "owners of private files",
        (
            _owner(UNIT, "unit", seen="1000"),
            _owner(f"$(ls {SECRETS}/*)"),
            Case(
                "the recovery unit is gone", f"rm /etc/systemd/system/{RECOVER}", RECOVER,
                "is missing", "installed", "is missing", "unit",
            ),
        ),
        steps=("repair",),
    ),
    Round(
        "unit file written again",
        (
            Case(
                "process older than its unit", f"touch {UNIT}", NAME,
                "the process is older than its unit file", "the last start by this tool", "is older", "unit",
            ),
        ),
        steps=("restart",),
        restarts=True,
    ),
    Round(
        "unit file edited",
        (
            Case(
                "unit edited", f"echo '# by hand' >> {UNIT}", NAME,
                "is not the one that was installed", "the last start by this tool", "is not the one", "unit",
            ),
            Case(
                "edit not read", "true", NAME,
                "systemd has not read the unit files", "the last start by this tool", "has not read", "unit",
            ),
            Case(
                "process older than its edited unit", "true", NAME,
                "the process is older than its unit file", "the last start by this tool", "is older", "unit",
            ),
        ),
        steps=("restart",),
        restarts=True,
    ),
    Round(
        "unit file removed",
        (
            Case(
                "unit gone", f"rm {UNIT}; systemctl daemon-reload", NAME,
                f"the unit file {UNIT} is gone", "the last start by this tool", "is gone", "unit",
            ),
            Case(
                "gone, so not started at boot", "true", SERVICE,
                "is not started at boot", "enabled", "disabled", "unit",
            ),
        ),
        steps=("restart",),
        restarts=True,
    ),
    Round(
        "another process",
        (
            Case(
                "arguments",
                f"rm -f {CACHE}/stranger; mkdir {UNIT}.d; {{ echo '[Service]'; echo ExecStart=; "
                f"sed -n '/^ExecStart=/s/ddtree-budget\" \"8/ddtree-budget\" \"9/p' {UNIT}; "
                f"echo User=root; echo Environment=PYTHONPATH={CURRENT} XDG_CACHE_HOME=/tmp; "
                f"sed -n 's/^Environment=\\(.*PYTHONPATH.*\\)/Environment=\\1/p' {UNIT}; }} > {DROP_IN}; "
                f"systemctl daemon-reload; systemctl restart {SERVICE}; {{wait}}; "
                f"rm -r {UNIT}.d; systemctl daemon-reload",
                "process $(systemctl show -P MainPID " + SERVICE + ")",
                "its arguments are not those", "--speculative-ddtree-budget 8",
                "other values of --speculative-ddtree-budget", "process",
            ),
            Case(
                "environment", "true", "process $(systemctl show -P MainPID " + SERVICE + ")",
                "its variable XDG_CACHE_HOME is not that", "/var/cache", "another value", "process",
            ),
            Case(
                "user", "true", "process $(systemctl show -P MainPID " + SERVICE + ")",
                "runs as root, not as ddtoolkit", "ddtoolkit", "root", "process",
            ),
            Case(
                "what the server decodes with", "true", "speculative.budget",
                "9 runs, 8 is deployed", "8", "9", "server",
            ),
            Case(
                "the cache of a root's process", "true", CACHE,
                "not to ddtoolkit", "ddtoolkit", "root", "host",
            ),
            Case(
                "started by hand", "true", NAME,
                "started again by other means", "the last start by this tool", "other means", "unit",
            ),
        ),
        steps=("provision", "repair", "restart"),
        restarts=True,
    ),
    Round(
        "stopped with systemctl",
        (
            Case(
                "does not run", f"systemctl stop {SERVICE}", NAME,
                "does not run", "running", "stopped", "process",
            ),
        ),
        steps=("start",),
        restarts=True,
    ),
    Round(
        "what no deploy ends",
        (
            Case(
                "a drop-in",
                f"mkdir {UNIT}.d; printf '[Service]\\nNice=5\\n' > {DROP_IN}; {RELOAD}",
                NAME,
                f"{DROP_IN} changes the unit", "the last start by this tool", "changes the unit", "unit",
            ),
            Case(
                "a link for the secrets", f"f=$(ls {SECRETS}/*); cp -p $f /kept; ln -sf /kept $f",
                f"$(ls {SECRETS}/*)", "is no file", "a private file", "l",
            ),
            Case(
                "a full disk", "{fill}", "/opt/ddtoolkit/services",
                "MiB are free", "256 MiB free", "MiB free", "host",
            ),
        ),
        by_hand=f"rm -r {UNIT}.d; {RELOAD}; f=$(ls {SECRETS}/*); rm $f; cp -p /kept $f; {{empty}}",
    ),
    Round(
        "masked",
        (
            Case(
                "a mask", f"cp {UNIT} /kept; ln -sf /dev/null {UNIT}; systemctl daemon-reload", SERVICE,
                "is masked", "loaded", "masked", "unit",
            ),
            Case(
                "masked, so not the unit", "true", NAME,
                "is not the one that was installed", "the last start by this tool", "is not the one", "unit",
            ),
        ),
        restarts=True,
        by_hand=f"systemctl unmask {SERVICE}; cp /kept {UNIT}; systemctl enable {SERVICE}; {RELOAD}",
    ),
    Round(
        "code, report and secrets",
        (
            Case(
                "the engine's code", f"echo >> {ENVIRONMENT}/toolkit/layout.py", ENVIRONMENT,
                "its files are not those that were built", "sha256 ", "sha256 ",
            ),
            Case(
                "the report", f"rm {CURRENT}/acceptance.json", f"{CURRENT}/acceptance.json",
                "its acceptance report is missing", "the report", "no such file",
            ),
            Case(
                "the secrets", f"rm {SECRETS}/*", f"$(ls {SECRETS}/*)",
                "the secrets file is missing", "a private file", "no such file",
            ),
        ),
        steps=("build", "release", "restart", "acceptance"),
        restarts=True,
        releases=True,
    ),
    Round(
        "release and environment",
        (
            Case(
                "the release's profile",
                f"sed -i 's/\"port\": 30000/\"port\": 30009/' {CURRENT}/profile.json", CURRENT,
                "is not the one that was deployed", "", "",
            ),
            Case(
                "a unit of another profile", "true", f"{CURRENT}/unit.json",
                "is not what the profile gives", "the release's profile", "another one",
            ),
            Case(
                "the environment's marker", f"rm {ENVIRONMENT}/environment.json", ENVIRONMENT,
                "is missing", "a whole environment", "is missing",
            ),
        ),
        steps=("build", "release", "restart", "acceptance"),
        restarts=True,
        releases=True,
    ),
)  # fmt: skip
