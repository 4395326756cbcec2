"""ddtoolkit: config-driven deployment of inference servers that decode with DDTree."""

__version__ = "0.1.0"
