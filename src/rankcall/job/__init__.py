"""What a rank says to other ranks about itself: its run, its records, its hangs."""
