"""What the user's objects hold: finding it, recording it, and comparing it with what it was.

inner_parts, held, comm_hooks     the parts of an object; of modules and tensors; of DDP's communication hooks
surroundings                      the variables of classes and modules, which are attributes of no object
kinds, places                     what single values are; how far generators and iterators have come
whose_code                        whether code is the user's, a library's, or ours
attributes, snapshot, contents    all that some objects hold at one moment; the contents of tensors
comparing, plain, packing         comparing values; plain values; values as JSON and named tensors
only_written                      what is written and never read
syntax, live_variables            reading source
"""
