"""SMDDP: the names of ``smdistributed.dataparallel.torch`` on existing backends.

``import smdistributed.dataparallel.torch.torch_smddp`` registers the c10d backend ``"smddp"``,
which is NCCL on GPUs. On CPUs it is nearlinear-collectives, or gloo where that is not installed.
Unlike SMDDP it supports every collective and operation of these, ``new_group``, and other backends
beside it.
"""
