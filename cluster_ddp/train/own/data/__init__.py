"""The batches of the user's DataLoader, from any position.

batches, stream_batches   those of a map-style data set, in an order derived from the epoch, and of an iterable one
order                     the order of any sampler
loader_copy               a DataLoader like the user's, with some parts replaced
held_data, same_data      a fingerprint of the data set, by which different data and another split are noticed
"""
