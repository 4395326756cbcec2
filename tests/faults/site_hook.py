"""Loaded by the test host's interpreter at its start: decides what this process is, and plays its part.

Installed beside `hook.py` and `stand_in.py`; a `.pth` file imports it. Processes of the toolkit get the
injector where a plan or a count is under way. The server, its build and its acceptance are replaced by the
contract stub where `/etc/ddfaults-stub` names them.
"""

import os
import sys

STUB_MARK = "/etc/ddfaults-stub"
CACHE = "/var/ddfaults-cache"
ROLES = {
    "toolkit.hostside": "agent",
    "toolkit.release.run": "transaction",
    "toolkit.release.boot": "boot",
    "toolkit.release.timer": "timer",
}
STUBS = {
    "toolkit.ddtree.server": "serve",
    "toolkit.ddtree.build": "build",
    "toolkit.acceptance.run": "accept",
}


def _module():
    words = sys.orig_argv
    return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


def _stubbed():
    # Every start of the interpreter comes through here: pathlib would be a good part of it.
    with open(STUB_MARK) as file:  # noqa: PTH123
        return file.read().split()


def play():
    """Become the stub, or get the injector; nothing for all other programs."""
    if "ddfaults_hook" in sys.modules:
        return  # the folder may be gone through twice
    module = _module()
    if module in STUBS and STUBS[module] in _stubbed():
        import ddfaults_stub

        words = sys.orig_argv
        os._exit(getattr(ddfaults_stub, STUBS[module])(words[words.index(module) + 1 :]))
    if module in ROLES:
        # Compiling the toolkit anew in each of its processes would be most of a run's time.
        sys.pycache_prefix, sys.dont_write_bytecode = CACHE, False
        import ddfaults_hook

        plan = ddfaults_hook.read_plan()
        if plan is not None:
            ddfaults_hook.install(ROLES[module], plan=plan)


def bootstrap(argv):
    """Run what SSH or Ansible gives to the host's Python; the first word tells which."""
    import ddfaults_hook

    plan = ddfaults_hook.read_plan()
    if "-c" in argv:
        code = argv[argv.index("-c") + 1]
        if plan is not None:
            ddfaults_hook.install("bootstrap", plan=plan)
        sys.argv = ["-c"]
        scope = {"__name__": "__main__"}
        exec(compile(code, "<string>", "exec"), scope)  # noqa: S102 - what python -c does
        return 0
    import subprocess

    real = [sys.executable, *argv]
    if plan is None:
        return subprocess.call(real)
    injector = ddfaults_hook.Injector("ansible", ddfaults_hook.FOLDER, plan)
    # Each task is a process of its own: they are numbered by a file.
    with open(f"{ddfaults_hook.FOLDER}/tasks", "a+") as file:  # noqa: PTH123
        file.write("x")
        file.flush()
        number = file.tell()
    return injector.operation(f"task {number}", lambda: subprocess.call(real), files=False)
