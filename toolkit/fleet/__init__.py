"""Many hosts at once: connections, plans, changes in turn, and what came of each."""
