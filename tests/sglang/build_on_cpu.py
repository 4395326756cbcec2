"""`python build_on_cpu.py ARGUMENTS`: the SGLang engine's build, beside what a CPU lacks (on_cpu.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import on_cpu

from toolkit.ddtree.sglang.build import main

assert on_cpu.REAL_KERNEL
sys.exit(main())
