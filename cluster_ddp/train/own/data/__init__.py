"""The batches of a DataLoader of one's own, from any place on.

batches, stream_batches   those of a map-style set, in an order that is a function of the epoch, and of an iterable one
loader_copy               a DataLoader like the user's, whose parts can be exchanged
held_data                 a fingerprint of the set, by which another split is recognised
"""
