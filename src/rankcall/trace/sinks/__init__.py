"""The destinations of descriptions: one module per sink, and the code that sinks share."""
