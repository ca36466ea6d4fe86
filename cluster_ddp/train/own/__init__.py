"""Training custom loops: a DataLoader and a loop that stay as they are, and are resumed exactly.

run, loop, loader, parts     what a program calls, and what happens around each of its steps
geometry                     what a step stands for, and whether another attempt may go on from it
handed, kept, twins          what is saved: what the program hands over, and what else it keeps
beginning, blocks, leaving   whether the loop runs in its block, what came of blocks, and how the ranks leave an epoch
left_out, wrapping           what ends a training, and models that are spread over the ranks in another way
program, values              what the program around a loop holds, and the tensors in a value

data/    the batches of its DataLoader, from any place on
watch/   what is seen of the program while it trains, and then told or refused
"""
