"""Flight Recorder's dumps: files, records and the rings made of them."""
