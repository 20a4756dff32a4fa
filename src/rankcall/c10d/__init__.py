"""One safe way to a c10d store, for all of rankcall: with a deadline, and without harm to the job.

From the bottom up: ``requests`` are the requests of a protocol, as values; ``location`` finds a
store's sockets in this process; ``connection`` makes the requests; ``calls`` can be given up;
``own_connections`` makes connections and keeps them; ``client`` runs a protocol with a deadline;
``parts`` are small protocols to build others from.

All but ``requests`` and ``parts`` import torch.
"""
