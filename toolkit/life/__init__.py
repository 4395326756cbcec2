"""What comes after a deploy: removing what nothing uses any more, and giving a host back."""
