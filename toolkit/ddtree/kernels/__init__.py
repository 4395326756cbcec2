"""Triton kernels of the engine, each beside its plain-torch reference.

Importing a module of this package imports triton; the CPU engine does without. Under TRITON_INTERPRET=1, set
before the import, the kernels run on CPU tensors.
"""
