"""What holds a job up: the wait-for graph, who is at its end, and what to say about it."""
