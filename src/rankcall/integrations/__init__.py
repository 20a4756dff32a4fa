"""Callbacks for frameworks: figures and verdicts of a recorded job, in the framework's own logger.

Each framework has a module of its own, which imports that framework; nothing here is imported with
rankcall, and recording needs none of it. A callback declares checkpoints and evaluation with
``rankcall.expect``. It asks no other rank, raises nothing into the job, and reads records on a
helper thread.
"""
