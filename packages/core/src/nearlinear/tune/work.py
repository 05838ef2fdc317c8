"""What a rank computes and holds: one block's time and activations, for the config's micro-batch.

They come from a model of one block and a small vocabulary, whose block has the real one's shapes.
"""

import dataclasses

import torch
from torch import nn

from .. import runtime
from ..memory.measure import numbers_out
from ..memory.states import BlockBytes, activations, state_bytes
from ..parallel.activations import strategy
from ..parallel.blocks import find_blocks
from ..parallel.delayed_init import materialise
from ..parallel.shard import COMPUTED_IN
from ..train.config import TrainConfig
from ..train.model import build_model
from ..train.presets import layers_key
from .estimate import Work
from .measure import slowest_medians
from .units import Unit

FEW_WORDS = 16  # the vocabulary of the model of one block
LOGITS_COPIES = 3  # float32: as the loss reads them, their log-softmax, their gradient


def measure_work(
    config: TrainConfig, units: list[Unit], vocabulary: int, now: runtime.Runtime, rounds: int
) -> Work:
    """The `Work` of ``config`` on this job's ranks, all at once. A collective call."""
    dtype = COMPUTED_IN[config.parallel.precision]
    forward, backward, block = _one_block(config, now.device, dtype, rounds)
    tokens = config.batch.micro_batch_size * config.sequence_length
    micro_batches = config.batch.micro_batches(now.mesh.data_ranks)
    root, *blocks = (unit.parameters for unit in units)
    return Work(
        root=root,
        blocks=tuple(blocks),
        gathered_bytes=dtype.itemsize,
        activations=_activations(config, block, len(blocks))
        + LOGITS_COPIES * 4 * tokens * vocabulary,
        forward=forward,
        backward=backward,
        accumulation=micro_batches,
        two_hop=config.train.two_hop,
        states=state_bytes(
            config.parallel,
            config.optimizer.kind,
            now.mesh.world,
            now.device.type,
            micro_batches,
        ),
    )


def _activations(config: TrainConfig, block: BlockBytes, blocks: int) -> int:
    """Of all blocks, as the table ``[activations]`` has them kept."""
    asked = config.activations
    checkpoint = strategy.parse(asked.checkpoint) if asked.checkpoint else None
    horizon = config.parallel.activation_loading_horizon if asked.offload else None
    return activations(block, blocks, checkpoint, horizon)


def _one_block(config: TrainConfig, device, dtype, rounds: int) -> tuple[float, float, BlockBytes]:
    """Seconds forward, seconds backward, and what is kept between them, of one block."""
    block, arguments, keywords = _block_and_input(config, device, dtype)
    states = arguments[0].detach().requires_grad_()
    passes = []

    def forward():
        output = block(states, *arguments[1:], **keywords)
        passes.append(output if isinstance(output, torch.Tensor) else output[0])

    def backward():
        output = passes.pop()
        output.backward(torch.ones_like(output))

    entering = states.untyped_storage().nbytes()
    tokens = states.numel() // states.shape[-1]
    products = tokens * (numbers_out(block) + states.shape[-1]) * states.element_size()
    kept = BlockBytes(_bytes_kept(forward, block), entering, products)
    backward()
    forward_seconds, backward_seconds = slowest_medians([forward, backward], device, rounds)
    return forward_seconds, backward_seconds, kept


def _block_and_input(config: TrainConfig, device, dtype) -> tuple[nn.Module, tuple, dict]:
    """A block with values, and what its model calls it with for the config's micro-batch."""
    shape = {k: v for k, v in config.model.overrides.items() if k != "vocab_size"}
    shape[layers_key(config.model.family)] = 1
    model = build_model(dataclasses.replace(config.model, overrides=shape), FEW_WORDS)
    materialise(model, model, device)
    model.to(device, dtype)
    (block,) = find_blocks(model)
    calls = []
    hook = block.register_forward_pre_hook(
        lambda block, arguments, keywords: calls.append((arguments, keywords)), with_kwargs=True
    )
    ids = torch.zeros(
        config.batch.micro_batch_size, config.sequence_length, dtype=torch.long, device=device
    )
    with torch.no_grad():
        model(input_ids=ids)
    hook.remove()
    ((arguments, keywords),) = calls
    return block, arguments, keywords


def _bytes_kept(forward, block: nn.Module) -> int:
    """Bytes that ``forward`` saves for the backward pass, parameters not counted."""
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward()
    return sum(saved.values())
