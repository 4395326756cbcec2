"""Desired state against observed state: an ordered list of steps with their reasons, before anything runs."""
