"""What is known of GPUs, as data."""
