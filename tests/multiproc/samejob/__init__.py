"""Run one program with and without recording and compare everything that its user can observe.

``programs`` collects the programs, which register themselves with ``registry``. ``modes`` holds the
ways to record them, ``mutants`` fake recordings that each break one rule. ``rank`` runs a program
in one process and writes its observations down, ``zygote`` forks the ranks, ``harness`` orders the
runs, and ``compare`` lists the differences of two runs.
"""
