"""The run directory: what a job leaves behind, and how it is loaded again."""
