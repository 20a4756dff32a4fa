"""What slows a job that goes on: ranks that come late, links that are slow."""
