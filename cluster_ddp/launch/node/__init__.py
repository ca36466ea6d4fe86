"""The node program: one on each node of an attempt, from its start to its ranks' end. It imports no torch.

program, report, reaper         what it does, the report of its environment, the cleanup if it is killed
node_failures                   what it records if its agent gives up or other nodes never come
ranks, rank_failures            the ranks: finding them, and how they failed
heartbeat, watchdog, hang_dump  what they are doing, and what is kept when they hang
stopping, forced_end, vanished  when they are asked to end, and when they are killed
rank_output                     what they print
"""
