"""Releases on a host: store, lock, history, and the transaction that changes what serves."""
