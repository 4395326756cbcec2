"""Model checkpoints on a host: fetched from where they are published or from a peer, checked, kept, removed.

What runs on a host needs nothing but the standard library, so that it also runs under a host's own Python
before anything is installed there. `wanted` (profiles) and `fanout` (many hosts) are the exceptions.
"""
