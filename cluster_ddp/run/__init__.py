"""A run on shared storage: its directory, record, events, attempts, stop requests and state.

Nothing here imports torch: login nodes, the node program and the ranks all use it.
"""
