"""For frameworks: callbacks that log a job's figures and verdicts, and ``Join`` for their loops.

Each framework has a module of its own, which imports that framework; nothing here is imported with
rankcall, and recording needs none of it. A callback declares checkpoints and evaluation with
``rankcall.expect``. It asks no other rank, raises nothing into the job, and reads records on a
helper thread. What all callbacks share is in ``reporter``.
"""
