"""A summary as something to read: on a terminal, as JSON, or as a page."""
