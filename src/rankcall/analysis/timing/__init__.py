"""Figures of a run: bandwidth, waiting and lateness, on clocks that agree."""
