"""Run one program with and without recording and compare everything that its user can observe.

``programs`` holds the programs, ``modes`` the ways to record them and ``mutants`` fake recordings
that each break one rule. ``rank`` runs a program in one process and writes down what happened,
``harness`` starts and ends the processes, and ``compare`` lists the differences of two runs.
"""
