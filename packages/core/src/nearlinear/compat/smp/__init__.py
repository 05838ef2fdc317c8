"""Interface of SageMaker's model parallel library v1 (SMP), on nearlinear.

::

    from nearlinear.compat import smp

    smp.init({"ddp": True, "sharded_data_parallel_degree": 8, "bf16": True})
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

Source: the public documentation. Scripts that import ``smdistributed.modelparallel.torch`` run
unmodified with nearlinear-compat: ``python -m nearlinear_compat run train.py``.
"""

from . import amp as amp
from . import nn as nn
from . import optimizers as optimizers
from . import patches as patches
from .checkpoint import load as load
from .checkpoint import resume_from_checkpoint as resume_from_checkpoint
from .checkpoint import save as save
from .checkpoint import save_checkpoint as save_checkpoint
from .model import DistributedModel as DistributedModel
from .model import delay_param_initialization as delay_param_initialization
from .model import model_creation as model_creation
from .model import partition as partition
from .model import register_parameter as register_parameter
from .model import set_activation_checkpointing as set_activation_checkpointing
from .model import set_partition as set_partition
from .model import set_tensor_parallelism as set_tensor_parallelism
from .model import tensor_parallelism as tensor_parallelism
from .optimizer import DistributedOptimizer as DistributedOptimizer
from .ranks import (
    DP_GROUP,
    DP_RANK,
    MP_GROUP,
    MP_RANK,
    PP_GROUP,
    PP_RANK,
    RDP_GROUP,
    RDP_RANK,
    TP_GROUP,
    TP_RANK,
    WORLD,
    WORLD_RANK,
    CommGroup,
    RankType,
    allgather,
    barrier,
    broadcast,
    dp_barrier,
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    local_rank,
    local_size,
    mp_barrier,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    recv_from,
    send,
    size,
    tp_rank,
    tp_size,
)
from .registration import tp_register as tp_register
from .registration import tp_register_with_module as tp_register_with_module
from .session import init as init
from .session import is_initialized as is_initialized
from .session import is_tracing as is_tracing
from .step_function import StepOutput as StepOutput
from .step_function import collect_outputs as collect_outputs
from .step_function import step as step

__all__ = [
    "CommGroup", "DP_GROUP", "DP_RANK", "DistributedModel", "DistributedOptimizer", "MP_GROUP",
    "MP_RANK", "PP_GROUP", "PP_RANK", "RDP_GROUP", "RDP_RANK", "RankType", "StepOutput", "TP_GROUP",
    "TP_RANK", "WORLD", "WORLD_RANK", "allgather", "amp", "barrier", "broadcast",
    "delay_param_initialization", "dp_barrier", "dp_rank", "dp_size", "get_dp_group",
    "get_dp_process_group", "get_mp_group", "get_mp_process_group", "get_pp_group",
    "get_pp_process_group", "get_rdp_group", "get_rdp_process_group", "get_tp_group",
    "get_tp_process_group", "get_world_process_group", "init", "is_initialized", "is_tracing",
    "load", "local_rank", "local_size", "model_creation", "mp_barrier", "mp_rank", "mp_size", "nn",
    "optimizers", "partition", "patches", "pp_rank", "pp_size", "rank", "rdp_rank", "rdp_size",
    "recv_from", "register_parameter", "resume_from_checkpoint", "save", "save_checkpoint", "send",
    "set_activation_checkpointing", "set_partition", "set_tensor_parallelism", "size", "step",
    "tensor_parallelism", "tp_rank", "tp_register", "tp_register_with_module", "tp_size",
]  # fmt: skip
