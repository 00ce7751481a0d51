"""The public names of four earlier libraries, a module each, as thin functions over this one's.

Code written for them moves over by its imports: `blocksparse` and `sparse_attention` (TensorFlow variables become
tensors), `pytorch_block_sparse`, and the ops of the SBNet release, `sbnet`. docs/weights.md lists every name and what
differs. Nothing else in the package imports these modules.
"""
