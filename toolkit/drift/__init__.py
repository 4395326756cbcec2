"""Where a host has drifted from what was deployed, and from the profile."""
