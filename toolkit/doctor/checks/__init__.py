"""The checks: pure functions of facts and profile."""
