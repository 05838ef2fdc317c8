"""SMDDP: the names of ``smdistributed.dataparallel.torch`` on existing backends.

``import smdistributed.dataparallel.torch.torch_smddp`` registers the c10d backend ``"smddp"``,
which is that of nearlinear-collectives where it is installed. Otherwise it is NCCL on GPUs and gloo
on CPUs. Unlike SMDDP it supports every collective and operation of these, ``new_group``, and other
backends beside it.
"""
