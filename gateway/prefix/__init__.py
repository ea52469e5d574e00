"""Which worker holds which prefix, in which tier, and how we know."""
