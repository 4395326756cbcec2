"""SSH to hosts: how each is reached, who it is, and the program that works there."""
