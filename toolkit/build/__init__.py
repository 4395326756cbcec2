"""Building the engine on a host: a content-addressed environment, kernel tuning, and the manifest."""
