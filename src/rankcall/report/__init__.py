"""A summary as something to read: on a terminal, or as JSON."""
