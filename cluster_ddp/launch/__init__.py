"""From an allocation to ranks: torchrun's arguments, rendezvous, and the node program that watches over it all.

Nothing here imports torch: the node program stays small and starts at once; torch belongs to the agent and the ranks.

On the batch host
    keeper, batch_host                    one start of the job, and the machine that the keeper runs on
    attempt, notice                       its attempt begins, and what follows is decided; the user is notified
    job_step, running_job_step,           the job step of srun: its command, its life, what it prints
    job_step_output
    allocation, end_of_job, queueing      what Slurm says of the job, how it ends, and how it is queued again
    sign_of_life, lost_nodes, bad_hosts   nodes that are silent, that failed, and that are to be avoided
On each node
    node, program, reaper, report         the node program, who cleans up after it, and what its node looked like
    agent, agent_failure, start_torchrun, torchrun's agent: its command line, its environment, why it gave up
    torchrun, environment, variables
    address, ports, rendezvous            where the agents meet
    ranks, processes, exits, failures     the ranks: which there are, and how they failed
    heartbeat, watchdog, hang_dump        what they are doing, and what is kept when they hang
    stopping, forced_end, vanished        when they are asked to end, and when they are ended
    rank_output, logs                     what they print
"""
