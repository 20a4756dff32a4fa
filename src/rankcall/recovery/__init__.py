"""The job carries on: what happens between a failed attempt of a job and the next one.

::

    policy        one table: restart, after which pause, or stop
    failures      what ended an attempt, as a signature
    history       the failures of a run, for who reads it
    leftovers     ends ranks that outlive their launcher
    health        whether this node is well enough to take part
    device_check  a program that asks the devices, for health
    links         transfers to other nodes, and their clocks, for health
    rendezvous    torch's, with a door for nodes that are barred
    supervisor    notes how attempts end, and asks the policy
    agent         torchrun's agent, which asks the supervisor
    previous      what the program of the next attempt can ask
"""
