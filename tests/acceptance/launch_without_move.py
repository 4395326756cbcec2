"""The embedded server with its K/V move left out: accepted nodes keep the rows they had in the tree."""

import sys

from toolkit.ddtree.engine import Engine
from toolkit.ddtree.server.__main__ import main

Engine._compact = lambda self, paths: None
sys.exit(main())
