"""From an allocation to ranks: torchrun's arguments, rendezvous, and the node program that watches over it all.

Nothing here imports torch: the node program stays small and starts at once; torch belongs to the agent and the ranks.
"""
