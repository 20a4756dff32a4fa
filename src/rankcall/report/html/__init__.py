"""A run as one page: no network, no server; opens from a mail attachment.

Charts are SVG and PNG made here, so that the page reads without its script, in print too. The
script (some 8 KiB) adds hovering, choosing and zooming.
"""

from rankcall.report.html.page import render

__all__ = ["render"]
