"""What is wrong with a host for a profile, told before anything is touched."""
