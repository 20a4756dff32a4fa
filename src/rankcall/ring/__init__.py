"""The ring file of one rank: its layout, side tables and lock; its writer, readers and follower."""
