"""Every op of c10d, issued by small cases that state the record that must come of it."""
