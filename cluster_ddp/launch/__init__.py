"""From an allocation to running ranks: torchrun's arguments, rendezvous, and the programs that watch over them.

Nothing here imports torch: the node program stays small and starts quickly; only the agent and the ranks load torch.

On the batch host
    keeper, keeper_records, batch_host    sees one start of the job through; what it records; the machine it runs on
    beginning, patience                   beginning an attempt, and waiting for storage that fails
    deciding, script_outcome, notice      what follows an attempt; how a script ended; notifying the user
    job_step, running_job_step,           srun's job step: its command, how it runs, what it prints
    job_step_output
    allocation, end_of_job, queueing      what Slurm says about the job, how it ends, how it is requeued
    stop_requests                         asking training to save and end
    sign_of_life, lost_nodes, bad_hosts   nodes that are silent, that failed, and that are to be avoided
On each node
    node, program, reaper, report         the node program, the cleanup after it, the report of its environment
    agent, agent_failure, start_torchrun, torchrun's agent: its command line, its environment, why it gave up
    torchrun, environment, variables
    node_failures                         what this node records of that, and of nodes that never came
    address, ports, rendezvous            where the agents meet
    ranks, processes, exits, failures     the ranks: finding them, and how they failed
    heartbeat, watchdog, hang_dump        what they are doing, and what is kept when they hang
    stopping, forced_end, vanished        when they are asked to end, and when they are killed
    rank_output, logs                     what they print
"""
