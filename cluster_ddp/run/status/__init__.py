"""Where a run stands, and why, for people: from its directory and, if Slurm answers, from Slurm.

report, cache, sweep                what `status` and `list` show; remembered for ended runs; of a sweep's elements
state, starting, final_state        which state a run is in: while it has an attempt, before, and afterwards
waiting                             what its job waits for
facts, keeper_at_work, silence      what that is determined from; nodes that have ended, or are silent
remarks, outlook, goodput           warnings and failures, when it will end, how much of its time counted
orphaned_jobs                       jobs that no folder mentions
"""
