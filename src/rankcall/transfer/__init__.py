"""Evidence leaves the node: the tails of a node's rings go to another node, or to a URL.

Nodes may share no disk, and the memory of a node is lost with it. At a verdict, the leader of each
node sends a *bundle* through the job's store, and rank 0's node and the first other node that
answers keep the bundles of all nodes in their run directories. When a rank ends, it sends a bundle
to rank 0's node. A run directory with bundles is a run like any other.

==============  ============================================================================
``bundle``      the files of a node: make them, put them into a run directory, write them to a URL
``posts``       the protocol: post bundles in a store, and collect them
``departure``   send a bundle when a rank ends, on a thread of its own
``at_verdict``  send a bundle at a verdict
==============  ============================================================================
"""
