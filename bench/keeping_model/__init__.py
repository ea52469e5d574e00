"""What to keep, and for how long, learned from what came back: see `model`."""
