"""Making hosts ready: what a profile needs of a host, what is missing, and the playbooks that mend it."""
