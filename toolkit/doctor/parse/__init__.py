"""Pure parsers of what a host's programs print; each raises nothing and leaves out what it cannot read."""
