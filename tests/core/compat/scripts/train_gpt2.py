"""Train a small GPT-2 the way SMP v1's documentation shows."""

import argparse

import smdistributed.modelparallel.torch as smp
import torch
from transformers import AutoModelForCausalLM, GPT2Config

ROWS, TOKENS, VOCABULARY = 8, 16, 64


def arguments(argv=None):
    parser = argparse.ArgumentParser()
    for name in ("tensor_parallel_degree", "pipeline_parallel_degree", "microbatches"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--sharded_data_parallel_degree", type=int, default=1)
    parser.add_argument("--gradient_accumulation", type=int, default=1)
    parser.add_argument("--prescaled_batch", type=int, default=1)
    parser.add_argument("--placement_strategy", default="cluster")
    parser.add_argument("--pipeline", default="interleaved")
    for name in (
        "bf16",
        "fp16",
        "delayed_param",
        "activation_checkpointing",
        "checkpoint_sublayers",
        "offload_activations",
        "shard_optimizer_state",
        "manual_partition",
        "use_distributed_transformer",
        "sum_gradients",
        "own_loss",
    ):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--checkpoint_dir")
    parser.add_argument("--save", choices=["partial", "full"])
    parser.add_argument("--load", choices=["partial", "full"])
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    return parser.parse_args(argv)


def batches(step, rows=ROWS):
    """Return the token ids of a step, for all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, VOCABULARY, (rows, TOKENS), generator=generator)


def mine(ids, args):
    """Return the rows that this rank reads."""
    if smp.pp_rank() > 0:  # only the first stage has data
        return torch.zeros_like(ids)[:1]
    if args.prescaled_batch:
        return ids.chunk(smp.rdp_size())[smp.rdp_rank()]
    return ids.chunk(smp.dp_size())[smp.dp_rank()]


@smp.step
def train_step(model, ids, args):
    if args.own_loss:
        logits = model(input_ids=ids).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1)
        )
    else:
        loss = model(input_ids=ids, labels=ids)["loss"]
    if args.sum_gradients:
        loss = loss / args.microbatches
    model.backward(loss / args.gradient_accumulation)
    return loss


@smp.step()
def test_step(model, ids):
    return model(input_ids=ids, labels=ids)["loss"]


def config(layers=4):
    return GPT2Config(
        n_layer=layers,
        n_head=4,
        n_embd=32,
        n_positions=TOKENS,
        vocab_size=VOCABULARY,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def create_model(args):
    torch.manual_seed(7)
    dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1 or args.use_distributed_transformer > 0,
        dtype=dtype,
        attention_in_fp32=False,
    ):
        return AutoModelForCausalLM.from_config(config())


def build(args):
    settings = {
        "ddp": True,
        "partitions": args.pipeline_parallel_degree,
        "microbatches": args.microbatches,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
        "placement_strategy": args.placement_strategy,
        "pipeline": args.pipeline,
        "prescaled_batch": args.prescaled_batch > 0,
        "shard_optimizer_state": args.shard_optimizer_state > 0,
        "bf16": args.bf16 > 0,
        "fp16": args.fp16 > 0,
        "delayed_parameter_initialization": args.delayed_param > 0,
        "offload_activations": args.offload_activations > 0,
        "activation_loading_horizon": 2,
        "skip_tracing": True,
    }
    if args.manual_partition:
        settings |= {"auto_partition": False, "default_partition": 0}
    smp.init(settings)
    model = create_model(args)
    model = smp.DistributedModel(
        model,
        trace_device="gpu",
        backward_passes_per_step=args.gradient_accumulation,
        average_grads_across_microbatches=not args.sum_gradients,
    )
    module = model.get_module()
    if args.use_distributed_transformer:
        layers = module.transformer.seq_layers
    else:
        layers = module.transformer.h
    if args.manual_partition:
        for number, layer in enumerate(layers.children()):
            smp.set_partition(layer, int(number >= 1))
    for layer in layers.children():
        if args.checkpoint_sublayers:
            attention, output = (
                (layer.attention, layer.output)
                if args.use_distributed_transformer
                else (layer.attn, layer.mlp)
            )
            smp.set_activation_checkpointing(attention, pack_args_as_tuple=True)
            smp.set_activation_checkpointing(output)
        elif args.activation_checkpointing:
            smp.set_activation_checkpointing(layer, pack_args_as_tuple=True, strategy="each")
    named = list(module.named_parameters())
    no_decay = [p for name, p in named if "bias" in name or "ln" in name]
    decay = [p for name, p in named if not ("bias" in name or "ln" in name)]
    optimizer = torch.optim.AdamW(
        [{"params": decay}, {"params": no_decay, "weight_decay": 0.0}],
        lr=args.learning_rate,
        weight_decay=0.1,
    )
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**12, "scale_window": 1000, "min_scale": 1},
    )
    return model, optimizer


def param_shapes(model, optimizer):
    """Return the shapes of the optimizer's parameters by name."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    return [{names[p]: p.shape for p in group} for group in optimizer.fp16_groups]


def train(model, optimizer, args):
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    first, losses, norms = 0, [], []
    if args.load:
        content = smp.resume_from_checkpoint(
            args.checkpoint_dir, tag=None, partial=args.load == "partial"
        )
        first = content["step"]
        scheduler.load_state_dict(content["scheduler"])
        assert content["config"].n_layer == 4 and content["args"].steps
        decayed, plain = content["param_shapes"]
        assert plain["transformer.ln_f.bias"] == (32,) and "transformer.wte.weight" in decayed
    for step in range(first, first + args.steps):
        total = 0.0
        optimizer.zero_grad(set_to_none=True)
        for part in range(args.gradient_accumulation):
            ids = mine(batches(step * args.gradient_accumulation + part), args)
            loss = train_step(model, ids, args).reduce_mean()
            total += loss.item() / args.gradient_accumulation
        if args.clip:
            norms.append(float(optimizer.clip_master_grads(args.clip)))
        optimizer.step()
        if not (args.fp16 and optimizer.overflow):
            scheduler.step()
        mean = torch.tensor(total)
        torch.distributed.all_reduce(mean, group=smp.get_rdp_process_group())
        losses.append(mean.item() / smp.rdp_size())
    if args.save:
        smp.save_checkpoint(
            args.checkpoint_dir,
            tag=f"step_{args.steps}",
            partial=args.save == "partial",
            model=model,
            optimizer=optimizer,
            user_content={
                "args": args,
                "config": config(),
                "scheduler": scheduler.state_dict(),
                "step": first + args.steps,
                "param_shapes": param_shapes(model, optimizer),
            },
        )
    model.eval()
    with torch.no_grad():
        ids = mine(batches(99), args)
        evaluated = test_step(model, ids).reduce_mean().item()
    model.train()
    return {"losses": losses, "evaluated": evaluated, "norms": norms}


def main(argv=None):
    args = arguments(argv)
    model, optimizer = build(args)
    return train(model, optimizer, args)


if __name__ == "__main__":
    print(main())
