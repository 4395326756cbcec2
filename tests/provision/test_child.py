"""What the program that runs Ansible tells of a task."""

from toolkit.provision.child import message_of


def test_what_came_in_a_modules_place_is_told() -> None:
    lost = {"msg": "no result", "module_stderr": "sudo: sorry, you must have a tty\n to run sudo\n"}
    said = "no result sudo: sorry, you must have a tty to run sudo"
    assert message_of(lost, "failed") == said
    gathered = {"msg": "setup failed:", "failed_modules": {"setup": lost, "other": {"msg": "why"}}}
    assert message_of(gathered, "failed") == (
        "setup failed: sudo: sorry, you must have a tty to run sudo why"
    )
