"""The DDTree engine: tree-based speculative decoding over a DFlash block-diffusion drafter.

Importable alone on a GPU host; it imports nothing from the rest of the toolkit.
"""
