"""Figures of a run: bandwidth, who waits for whom and how long, on clocks made comparable."""
