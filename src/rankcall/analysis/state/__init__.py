"""Where every rank stands at one moment, read from its ring or told by another node."""
