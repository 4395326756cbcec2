"""What holds for every test."""

import os
from pathlib import Path

# Triton decides when it is first imported, by whichever test comes first, whether kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
