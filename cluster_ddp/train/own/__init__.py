"""Custom training loops: resumes a program's own DataLoader and loop exactly, without modifying either.

joining, occupied            `join_run`, which makes a program a rank of a run; two of them in one folder
run, loop, loader, parts     what a program calls, and what happens around each of its steps
geometry                     which samples a step stands for, and whether an attempt may resume from it
passed_in, wrappers, kept,   what is saved: the objects the program passes in, without their wrappers, the values it
twins, rank_buffers,         keeps, the buffers of which each rank has its own, and which weights have a gradient
zero_gradients
beginning, blocks, leaving,  whether the loop runs in its block, how blocks ended, how the ranks leave an epoch, and
after_loop                   whether the code after the loop changes the weights
skipped_updates, by_hand,    too many skipped updates, updates without the optimizer, and models distributed by
wrapping                     something other than DDP
program, values              what the program around a loop holds, and the tensors in a value

data/    the batches of its DataLoader, from any position
watch/   what is observed of the program while it trains, and then reported or refused
"""
