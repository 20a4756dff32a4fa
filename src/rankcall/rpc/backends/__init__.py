"""The back ends of ``rankcall.rpc``: TENSORPIPE and ZMQ."""
