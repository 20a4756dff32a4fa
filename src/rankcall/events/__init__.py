"""From the ring to whoever subscribes: the dispatcher and the statuses of ops."""
