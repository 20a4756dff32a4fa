"""Tell this process what happens in it: from the ring to hooks and to sinks of traces."""
