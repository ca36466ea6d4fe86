"""The training data: the order of its samples, fetching them, and each rank's batches from step to step.

streams, order                     a rank's batches from a step on, and which samples they have
sets, fetch, seeded_reads          map-style sets: their kinds, and reading samples
iterable, reader, collating        iterable sets
loader, another_worker             in this process or by workers
fork_server, in_fork_server        the server that forks workers survives what asks a run to stop
made_from, fingerprint             whether samples stay what they were
"""
