"""The command line: parse, call, show. No logic, and nothing heavy imported before a command runs."""
