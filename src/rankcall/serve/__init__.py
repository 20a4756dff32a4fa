"""``rankcall serve``: one page that shows all ranks of a job, live, to all who have the link.

``live_run`` reads the rings as ``rankcall top`` does, ``figures`` keeps the last minutes, ``view``
turns both into the page's sections, ``shared_look`` gives all viewers the result of one look, and
``app`` answers requests that ``access`` lets through. Nothing is read while the page has no viewer.
"""
