"""The keeper: the program on the batch host that sees one start of a job through. It knows Slurm, and imports no torch.

keeper, records, batch_host               one start from beginning to end; what it records; the machine it runs on
beginning, patience                       beginning an attempt, and waiting for storage that fails
job_step, running_job_step,               srun's job step: its command, how it runs, what it prints
job_step_output
deciding, script_outcome                  what follows an attempt, and how a script ended
allocation, end_of_job, requeueing        what Slurm says about the job, how it ends, how it is requeued
stop_requests                             asking training to save and end
lost_nodes, bad_hosts                     nodes that could not report their end, and those to be avoided
"""
