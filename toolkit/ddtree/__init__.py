"""The DDTree engine: tree-based speculative decoding over a DFlash block-diffusion drafter.

Importable alone on a GPU host; it imports nothing from the rest of the toolkit.
"""

import os

# Torch's threads wait for each other by spinning unless told otherwise, and then a busy neighbour on one core
# can slow decoding down tenfold. OpenMP reads this once, at the first import of torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# numpy multiplies small matrices here: more threads would only wait busily, on the cores of torch.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
