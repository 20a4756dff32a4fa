"""From torch to the ring: what sees each collective, natively or in Python."""
