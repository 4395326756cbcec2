"""Hardware profiles: schema, loading, rules across keys, and the resolved form."""
