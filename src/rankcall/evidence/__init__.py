"""Evidence that other tools left about a job.

::

    dump_files        reads Flight Recorder's dumps: which files are dumps, of which rank, and what
                      they contain; treats every file as hostile
    dump_records      turns the entries of one dump into records
    flight_recorder   turns the dumps of all ranks into rings

A run that is made of rings of another tool is read, judged and reported like every other run.
"""
