"""Logs of jobs: the lines that tell why a job failed, and the facts in them."""
