"""The libraries of an engine on a host: hash-locked, a folder each, shared by all releases that name it.

Standard library only: it also runs under a host's own Python, before anything is installed there.
"""
