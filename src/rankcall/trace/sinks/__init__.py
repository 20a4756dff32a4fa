"""Where descriptions go: one module a destination, and what all of them have in common."""
