"""Run the programs of `programs` with torch.distributed, on groups of any backend.

A runner keeps calls in flight on several groups and overwrites every input as soon as its call is
complete. Half of the ranks then copy the outputs and overwrite them too; the other half read their
outputs at the end of the program. This detects memory that a peer still reads or writes, or that it
shares permanently.
"""

import dataclasses
import random
import time
import warnings

import torch
import torch.distributed as dist

from tests.collectives.programs import (
    COALESCED,
    SCATTERS,
    Program,
    Step,
    differences,
    elements,
    fingerprints,
    values,
)

CPU = torch.device("cpu")
SHAPED = ("all_reduce", "broadcast", "all_gather_list", "reduce_scatter_list")  # may be 2-D

# Names before torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclasses.dataclass
class Issued:
    """A started call: its outputs, the inputs it may still read, its work or None."""

    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]
    work: object


class Runner:
    """Runs a program on one rank. ``plain``: only contiguous memory allocated by torch."""

    def __init__(self, program: Program, rank: int, groups: list, plain: bool = False):
        self.program, self.rank, self.groups, self.plain = program, rank, groups, plain
        self.random = random.Random(hash((program.seed, rank)))

    def run(self) -> list[list[torch.Tensor]]:
        """Return the outputs of this rank per step; empty for steps of other groups."""
        outputs, pending = [], {}
        for index, step in enumerate(self.program.steps):
            outputs.append([])
            if self.rank in self.program.groups[step.group]:
                if step.jitter:
                    time.sleep(self.random.random() * 0.002)
                pending[index] = self.issue(index, step)
            for earlier in list(pending):
                if earlier + self.program.steps[earlier].overlap <= index:
                    outputs[earlier] = self.complete(earlier, pending.pop(earlier))
        for earlier, issued in pending.items():
            outputs[earlier] = self.complete(earlier, issued)
        return outputs

    def issue(self, index: int, step: Step) -> Issued:
        members = self.program.groups[step.group]
        call = Call(self, index, step, members)
        if step.kind in COALESCED:
            return call.coalesced()
        return getattr(call, step.kind)()

    def complete(self, index: int, issued: Issued) -> list[torch.Tensor]:
        if issued.work is not None:
            issued.work.wait()
        for tensor in issued.inputs:
            tensor.fill_(77)
        if (index + self.rank) % 2:
            return issued.outputs
        copies = [output.clone() for output in issued.outputs]
        for output in issued.outputs:
            output.fill_(99)
        return copies


class Call:
    """Call the operation of a step."""

    def __init__(self, runner: Runner, index: int, step: Step, members: tuple[int, ...]):
        self.runner, self.index, self.step = runner, index, step
        self.members, self.n, self.me = members, len(members), members.index(runner.rank)
        self.root = members[step.root % self.n]
        self.is_root = self.root == runner.rank
        self.group = runner.groups[step.group]
        self.op = getattr(dist.ReduceOp, step.reduce)
        self.count = step.sizes[0]
        self.options = {"group": self.group, "async_op": step.overlap > 0}

    def empty(self, count: int) -> torch.Tensor:
        """Allocate a tensor of ``count`` elements in the step's layout."""
        step, runner = self.step, self.runner
        dtype, layout = getattr(torch, step.dtype), step.layout
        if runner.plain:
            return torch.empty(count, dtype=dtype)
        if layout == "mixed":
            layout = ("strided", "contiguous", "offset")[runner.rank % 3]
        room = {"strided": 2 * count, "offset": count + 1}.get(layout, count)
        backend = self.group._get_backend(CPU)
        if step.pooled and backend.supports_tensor_alloc(CPU):  # torch 2.8 does not ask the backend
            memory = backend.allocate_tensor(room, dtype=dtype, device=CPU)
        else:
            memory = torch.empty(room, dtype=dtype)
        if layout == "strided":
            return memory[::2]
        if layout == "offset":
            return memory[1:]
        if layout == "transposed" and step.kind in SHAPED and count % 3 == 0:
            return memory.view(count // 3, 3).t()
        return memory

    def filled(self, content: torch.Tensor) -> torch.Tensor:
        tensor = self.empty(content.numel())
        tensor.copy_(content.view(tensor.shape))
        return tensor

    def own(self, chunks: int = 1, part: int = 0) -> torch.Tensor:
        """Return this rank's input, ``chunks`` times the step's size."""
        count = chunks * self.step.sizes[part]
        return values(self.runner.program, self.index, self.runner.rank, count, part)

    def barrier(self) -> Issued:
        return Issued([], [], dist.barrier(**self.options))

    def all_reduce(self) -> Issued:
        tensor = self.filled(self.own())
        return Issued([tensor], [], dist.all_reduce(tensor, self.op, **self.options))

    def broadcast(self) -> Issued:
        tensor = self.filled(self.own())
        return Issued([tensor], [], dist.broadcast(tensor, self.root, **self.options))

    def reduce(self) -> Issued:
        tensor = self.filled(self.own())
        work = dist.reduce(tensor, self.root, self.op, **self.options)
        return Issued([tensor] if self.is_root else [], [], work)

    def all_gather(self) -> Issued:
        output = self.empty(self.n * self.count)
        if self.step.in_place:
            source = output[self.me * self.count : (self.me + 1) * self.count]
            source.copy_(self.own())
        else:
            source = self.filled(self.own())
        work = all_gather_single(output, source, **self.options)
        return Issued([output], [] if self.step.in_place else [source], work)

    def all_gather_list(self) -> Issued:
        outputs, source = [self.empty(self.count) for _ in range(self.n)], self.filled(self.own())
        return Issued(outputs, [source], dist.all_gather(outputs, source, **self.options))

    def all_gather_views(self) -> Issued:
        whole, source = self.empty(self.n * self.count), self.filled(self.own())
        outputs = [whole[i * self.count : (i + 1) * self.count] for i in range(self.n)]
        if self.step.in_place:
            outputs[self.me].copy_(source)
            source = outputs[self.me]
        work = dist.all_gather(outputs, source, **self.options)
        return Issued(outputs, [] if self.step.in_place else [source], work)

    def gather(self) -> Issued:
        outputs = [self.empty(self.count) for _ in range(self.n)] if self.is_root else None
        source = self.filled(self.own())
        work = dist.gather(source, outputs, self.root, **self.options)
        return Issued(outputs or [], [source], work)

    def reduce_scatter(self) -> Issued:
        source = self.filled(self.own(chunks=self.n))
        if self.step.in_place:
            output = source[self.me * self.count : (self.me + 1) * self.count]
        else:
            output = self.empty(self.count)
        work = reduce_scatter_single(output, source, self.op, **self.options)
        return Issued([output], [] if self.step.in_place else [source], work)

    def reduce_scatter_list(self) -> Issued:
        chunks = self.own(chunks=self.n).view(self.n, self.count)
        sources, output = [self.filled(chunk) for chunk in chunks], self.empty(self.count)
        work = dist.reduce_scatter(output, sources, self.op, **self.options)
        return Issued([output], sources, work)

    def scatter(self) -> Issued:
        chunks, output = self.own(chunks=self.n).view(self.n, self.count), self.empty(self.count)
        sources = [self.filled(chunk) for chunk in chunks] if self.is_root else None
        work = dist.scatter(output, sources, self.root, **self.options)
        return Issued([output], sources or [], work)

    def all_to_all(self) -> Issued:
        source, output = self.filled(self.own(chunks=self.n)), self.empty(self.n * self.count)
        work = dist.all_to_all_single(output, source, **self.options)
        return Issued([output], [source], work)

    def split_own(self) -> list[torch.Tensor]:
        """Return this rank's input for each member; uneven kinds have parts of several sizes."""
        sizes = [elements(self.step, self.me, target) for target in range(self.n)]
        runner = self.runner
        whole = values(runner.program, self.index, runner.rank, sum(sizes))
        return [self.filled(part) for part in whole.split(sizes)]

    def empty_parts(self) -> list[torch.Tensor]:
        return [self.empty(elements(self.step, source, self.me)) for source in range(self.n)]

    def all_to_all_list(self) -> Issued:
        sources, outputs = self.split_own(), self.empty_parts()
        return Issued(outputs, sources, dist.all_to_all(outputs, sources, **self.options))

    def all_to_all_uneven(self) -> Issued:
        sizes = [
            [elements(self.step, self.me, other) for other in range(self.n)],
            [elements(self.step, other, self.me) for other in range(self.n)],
        ]
        sent = values(self.runner.program, self.index, self.runner.rank, sum(sizes[0]))
        source, output = self.filled(sent), self.empty(sum(sizes[1]))
        work = dist.all_to_all_single(output, source, sizes[1], sizes[0], **self.options)
        return Issued([output], [source], work)

    def all_gather_uneven(self) -> Issued:
        outputs, own = self.empty_parts(), elements(self.step, self.me, self.me)
        source = self.filled(values(self.runner.program, self.index, self.runner.rank, own))
        return Issued(outputs, [source], dist.all_gather(outputs, source, **self.options))

    def reduce_scatter_uneven(self) -> Issued:
        sources, output = self.split_own(), self.empty(elements(self.step, self.me, self.me))
        work = dist.reduce_scatter(output, sources, self.op, **self.options)
        return Issued([output], sources, work)

    def ring(self) -> Issued:
        source, output = self.filled(self.own()), self.empty(self.count)
        after, before = self.members[(self.me + 1) % self.n], self.members[self.me - 1]
        if self.n == 1:  # a rank cannot send to itself
            return Issued([source], [], None)
        messages = {"group": self.group, "tag": self.index}
        if self.step.kind == "ring_batch":
            receive = dist.P2POp(dist.irecv, output, before, **messages)
            send = dist.P2POp(dist.isend, source, after, **messages)
            works = dist.batch_isend_irecv([receive, send])
        else:
            works = [dist.isend(source, after, **messages), dist.irecv(output, before, **messages)]
        return self.in_flight([output], [source], Works(works))

    ring_batch = ring

    def from_any(self) -> Issued:
        """Receive at the root in the order of arrival."""
        source, messages = self.filled(self.own()), {"group": self.group, "tag": self.index}
        if not self.is_root:
            works = Works([dist.isend(source, self.root, **messages)])
            return self.in_flight([], [source], works)
        outputs = {self.runner.rank: source}
        for _ in range(self.n - 1):
            output = self.empty(self.count)
            outputs[dist.recv(output, **messages)] = output
        return Issued([outputs[member] for member in self.members], [], None)

    def in_flight(self, outputs: list, inputs: list, works: "Works") -> Issued:
        """Return works now, or after their end if the step is synchronous."""
        if self.step.overlap == 0:
            works.wait()
        return Issued(outputs, inputs, works if self.step.overlap else None)

    def coalesced(self) -> Issued:
        kind, parts = self.step.kind, range(len(self.step.sizes))
        inputs = [self.filled(self.own(self.n if kind in SCATTERS else 1, p)) for p in parts]
        if kind == "all_reduce_coalesced":
            outputs, spent = inputs, []
        else:
            times = self.n if kind == "all_gather_coalesced" else 1
            outputs, spent = [self.empty(times * count) for count in self.step.sizes], inputs
        asynchronous = self.step.overlap > 0
        with dist._coalescing_manager(group=self.group, async_ops=asynchronous) as manager:
            for output, source in zip(outputs, inputs, strict=True):
                if kind == "all_reduce_coalesced":
                    dist.all_reduce(source, self.op, group=self.group)
                elif kind == "all_gather_coalesced":
                    all_gather_single(output, source, group=self.group)
                else:
                    reduce_scatter_single(output, source, self.op, group=self.group)
        return Issued(outputs, spent, manager if asynchronous else None)


class Works(list):
    """Works that are waited for together."""

    def wait(self) -> None:
        for work in self:
            work.wait()


def run(rank: int, program: Program, backend: str):
    """Run a program over new groups on one rank; return (wrong results, fingerprints).

    The first group has all ranks; it is the default group if the backend is the same. gloo gets
    contiguous memory only, because it reduces strided tensors wrongly, and may round 16-bit floats
    after every addition.
    """
    warnings.simplefilter("ignore")
    default = dist.group.WORLD
    groups = [
        default
        if number == 0 and backend == dist.get_backend()
        else dist.new_group(list(members), backend=backend)
        for number, members in enumerate(program.groups)
    ]
    gloo = backend == "gloo"
    outputs = Runner(program, rank, groups, plain=gloo).run()
    wrong = differences(program, rank, outputs, wide=not gloo)
    for group in groups:
        if group is not default and group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.barrier(group=group)
            dist.destroy_process_group(group)
    return wrong, fingerprints(program, outputs)
