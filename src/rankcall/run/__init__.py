"""A run: the directory that a job leaves, and everything that is read from it.

``directory`` says where each file of a run is, and ``load`` reads a run as tables. Each of the
other modules owns one kind of file in the run directory.
"""
