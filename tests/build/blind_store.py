"""`python -m tests.build.blind_store`: the store's program, where something else fills its disk meanwhile."""

import sys

from toolkit.build.wheel_store import Store
from toolkit.build.wheels.__main__ import main

Store.short = lambda *_: None
Store.reserve = lambda store, wheels: store.folder.mkdir(parents=True, exist_ok=True)
sys.exit(main())
