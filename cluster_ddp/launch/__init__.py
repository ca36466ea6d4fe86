"""From an allocation to running ranks. Nothing here imports torch, but torchrun itself.

keeper/      on the batch host: one start of the job, from beginning the attempt to requeueing
node/        on each node: starts torchrun, and watches over the ranks
torchrun/    its command line, its agent, where agents meet

variables, environment    the variables that name the run, and the environment of the agent and the ranks
address, ports            where to meet
processes                 which processes belong to an attempt
sign_of_life              how the keeper sees that node programs are alive
logs                      reading log files
notice                    notifying the user
"""
