"""torchrun: its command line, its agent, and where agents meet.

``python -m cluster_ddp.launch.torchrun`` runs it. Everything else here is for the programs that start it and watch it,
and imports no torch until torchrun runs.

command          the command line
agent            the agent as a child of the node program
rendezvous       where agents and ranks meet, with signatures
exits            which ranks there are, and how they ended
agent_failure    why an agent gave up, for people
"""
