"""Where every rank stands at one moment: read from rings, or received from other nodes."""
