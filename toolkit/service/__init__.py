"""The served process: one unit model, and the managers that run it."""
