"""Tensor parallelism: split the matrices of layers over ranks, and tokens between the layers."""
