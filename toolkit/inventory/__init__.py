"""Hosts, as `ansible-inventory` resolves them."""
