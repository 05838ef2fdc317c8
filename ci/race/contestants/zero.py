"""DeepSpeed ZeRO-3 on the CPU, with thresholds in proportion to the model.

Its defaults are for models of billions of parameters: here they would keep the whole model
gathered. Gradient clipping, on by default, is off, as it is for everybody else.
"""

from __future__ import annotations

import torch.distributed as dist

from .. import model
from ..plan import Plan


class Zero3:
    def __init__(self, plan: Plan):
        import deepspeed

        deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
        built = model.build(plan)
        block = sum(p.numel() for p in model.blocks(built)[0].parameters())
        config = {
            "train_micro_batch_size_per_gpu": plan.micro_batch,
            "gradient_accumulation_steps": plan.accumulation,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "stage3_prefetch_bucket_size": block,
                "stage3_max_live_parameters": 2 * block,
                "stage3_max_reuse_distance": 2 * block,
                "reduce_bucket_size": block,
            },
        }
        self.engine, *_ = deepspeed.initialize(
            model=built, optimizer=model.optimizer(built.parameters(), plan), config=config
        )

    def step(self, batches) -> float:
        total = 0.0
        for batch in batches:
            loss = self.engine(**batch).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item()
        return total / len(batches)


def build(plan: Plan) -> Zero3:
    return Zero3(plan)
