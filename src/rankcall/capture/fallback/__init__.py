"""The capture in Python, for platforms on which the native recorder cannot be built."""
