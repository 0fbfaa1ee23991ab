"""What ranks do in tests of the safety of `Sync`. Light, because every process of a rank imports it: no pytest."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from processes import process_at
from torch import Tensor, nn
from torch.optim import Optimizer
from workers import be_killed, be_stopped, report_and_stay, wait_for_reports

import syncline
from syncline.errors import PeerError, SynclineError
from syncline.fabric.base import Fabric
from syncline.tracing.spans import StepSpan
from syncline.tracing.totals import Totals

ONE_EACH = {"first_bucket_bytes": 1, "bucket_bytes": 1}  # a bucket for every parameter
ADAMW = partial(torch.optim.AdamW, lr=0.05, foreach=False)
NOTE_S = 1.3  # after which a note has reached the store of the torch fabric


class Net(nn.Module):
    """Three layers: gradients come for `third` first and for `first` last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Words(nn.Module):
    """A table whose gradient is sparse, and a layer whose gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6, sparse=True)
        self.last = nn.Linear(6, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.table(words))


def filled(model: nn.Module, seed: int = 0) -> nn.Module:
    """With the same numbers whatever the global generator does: ranks that are threads share it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def batch(rank: int, step: int, rows: int = 5) -> Tensor:
    """Different on every rank and in every step."""
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def words(rank: int, step: int) -> Tensor:
    """Different on every rank and in every step, with some that all ranks have."""
    return torch.tensor([0, 1 + rank, (3 * step + rank) % 10, 9])


def snapshot(model: nn.Module) -> list[Tensor]:
    """The parameters as they are now."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of the optimizer as they are now."""
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return [tensor.clone() for tensor in tensors]


@dataclass
class Trained:
    """What one rank has to say after training."""

    parameters: list[list[Tensor]] = field(default_factory=list)  # at the start and after each step
    states: list[list[Tensor]] = field(default_factory=list)  # of the optimizer, after each step
    gradients: list[list[Tensor | None]] = field(default_factory=list)  # after each step
    error: str = ""  # the name of its type
    message: str = ""
    culprit: int | None = None
    at_the_end: list[Tensor] = field(default_factory=list)  # parameters, also after an error
    buckets: list[list[str]] = field(default_factory=list)
    totals: Totals | None = None
    seconds: float = 0.0


Poison = Callable[[int, int, nn.Module, Tensor], Tensor]  # rank, step, model, loss -> loss


def unchanged(rank: int, step: int, model: nn.Module, loss: Tensor) -> Tensor:
    return loss


def train(
    fabric: Fabric,
    steps: int,
    *,
    build: Callable[[], nn.Module] = Net,
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = ADAMW,
    data: Callable[[int, int], Tensor] = batch,
    poison: Poison = unchanged,
    before_step: Callable[[int, int, nn.Module, Optimizer], None] | None = None,
    prepare: Callable[[int, nn.Module], None] | None = None,
    **settings: object,
) -> Trained:
    """Train, and stop at the first error of Syncline's."""
    model = filled(build())
    if prepare is not None:
        prepare(fabric.rank, model)
    chosen = optimizer(model.parameters())
    trained = Trained(parameters=[snapshot(model)])
    started = time.monotonic()
    try:
        sync = syncline.Sync(model, chosen, fabric=fabric, **settings)
        trained.parameters = [snapshot(model)]
        for step in range(1, steps + 1):
            if before_step is not None:
                before_step(fabric.rank, step, model, chosen)
            chosen.zero_grad()
            started = time.monotonic()
            loss = model(data(fabric.rank, step)).square().mean()
            poison(fabric.rank, step, model, loss).backward()
            chosen.step()
            trained.parameters.append(snapshot(model))
            trained.states.append(state_of(chosen))
            trained.gradients.append([copy_of(parameter.grad) for parameter in model.parameters()])
        trained.buckets, trained.totals = sync.buckets, sync.report()
    except SynclineError as error:
        trained.error, trained.message = type(error).__name__, str(error)
        trained.culprit = error.rank if isinstance(error, PeerError) else None
        trained.seconds = time.monotonic() - started
    trained.at_the_end = snapshot(model)
    return trained


def copy_of(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


@dataclass(frozen=True)
class Spoils:
    """The loss of one rank is multiplied by something in some steps."""

    rank: int
    steps: tuple[int, ...]
    factor: float

    def __call__(self, rank: int, step: int, model: nn.Module, loss: Tensor) -> Tensor:
        return loss * self.factor if rank == self.rank and step in self.steps else loss


@dataclass(frozen=True)
class SpoilsTable:
    """The gradient of a sparse table, and of nothing else, is multiplied by something on one rank in one step."""

    rank: int
    step: int
    factor: float

    def __call__(self, rank: int, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        model.table._forward_hooks.clear()
        if (rank, step) == (self.rank, self.step):
            model.table.register_forward_hook(lambda _, __, rows: spoil(rows, self.factor))


def spoil(rows: Tensor, factor: float) -> None:
    rows.register_hook(lambda gradient: gradient * factor)


def train_with_two_optimizers(fabric: Fabric, steps: int, poison: Poison = unchanged, **settings: object) -> Trained:
    """Both make a step after each backward pass."""
    model = filled(Net())
    parameters = list(model.parameters())
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:3], parameters[3:])]
    sync = syncline.Sync(model, optimizers, fabric=fabric, **settings)
    trained = Trained(parameters=[snapshot(model)])
    try:
        for step in range(1, steps + 1):
            model.zero_grad()
            poison(fabric.rank, step, model, model(batch(fabric.rank, step)).square().mean()).backward()
            for optimizer in optimizers:
                optimizer.step()
            trained.parameters.append(snapshot(model))
        trained.totals = sync.report()
    except SynclineError as error:
        trained.error, trained.message = type(error).__name__, str(error)
    trained.at_the_end = snapshot(model)
    return trained


# Replicas that drift apart


def flip_a_bit(rank: int, model: nn.Module, optimizer: Optimizer) -> None:
    if rank == 1:
        model.second.weight.data.view(-1).view(torch.int32)[11] ^= 1


def change_a_sign_of_zero(rank: int, model: nn.Module, optimizer: Optimizer) -> None:
    model.second.weight.data[2, 3] = -0.0 if rank == 1 else 0.0


def swap_two(rank: int, model: nn.Module, optimizer: Optimizer) -> None:
    if rank == 1:
        flat = model.second.weight.data.view(-1)
        flat[[4, 5]] = flat[[5, 4]]


def change_optimizer_state(rank: int, model: nn.Module, optimizer: Optimizer) -> None:
    if rank == 1:
        optimizer.state[model.second.weight]["exp_avg"].view(-1).view(torch.int32)[0] ^= 1


def lose_optimizer_state(rank: int, model: nn.Module, optimizer: Optimizer) -> None:
    if rank == 1:
        optimizer.state.pop(model.second.weight)


@dataclass(frozen=True)
class Tampers:
    """Something changes on one rank before a step."""

    step: int
    change: Callable[[int, nn.Module, Optimizer], None]

    def __call__(self, rank: int, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        if step == self.step:
            self.change(rank, model, optimizer)


# Ranks that differ from the start


class RenamedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fourth = self.third
        del self.third


class WiderNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(8, 5)


class DoubleNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.third.double()


class ReorderedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        first = self.first
        del self.first
        self.first = first


class FrozenNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.bias.requires_grad_(False)


class BufferedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3))


# What the odd rank has: its model and its settings.
LAYOUTS: dict[str, tuple[type[Net], dict[str, object]]] = {
    "names": (RenamedNet, {}),
    "shapes": (WiderNet, {}),
    "dtypes": (DoubleNet, {}),
    "order": (ReorderedNet, {}),
    "requires_grad": (FrozenNet, {}),
    "buffers": (BufferedNet, {}),
    "settings": (Net, {"bucket_bytes": 1234}),
}


def differ_in_layout(fabric: Fabric, odd: int) -> dict[str, tuple[str, str, bool, float]]:
    """For each difference: the error, its text, whether parameters are as before, and a sum made afterwards."""
    found = {}
    for name, (build, settings) in LAYOUTS.items():
        is_odd = fabric.rank == odd
        trained = train(fabric, 0, build=build if is_odd else Net, prepare=own_numbers, **(settings if is_odd else {}))
        same = all(map(torch.equal, trained.parameters[0], trained.at_the_end))
        afterwards = fabric.all_reduce(torch.tensor([1.0 + fabric.rank])).item()
        found[name] = trained.error, trained.message, same, afterwards
    return found


def own_numbers(rank: int, model: nn.Module) -> None:
    filled(model, seed=rank)


# Faults


def arm_forward(model: Net, optimizer: Optimizer, strike: Callable[[], None]) -> None:
    model.second.register_forward_pre_hook(lambda *_: strike())


def arm_start_of_backward(model: Net, optimizer: Optimizer, strike: Callable[[], None]) -> None:
    """Before any gradient of a parameter is there."""
    model.third.register_forward_hook(lambda _, __, output: watch(output, strike))


def arm_between_buckets(model: Net, optimizer: Optimizer, strike: Callable[[], None]) -> None:
    """When the gradients of `third` have been sent, and before those of `second` are there."""
    model.second.register_forward_hook(lambda _, __, output: watch(output, strike))


def arm_optimizer(model: Net, optimizer: Optimizer, strike: Callable[[], None]) -> None:
    """Inside of the step, when `Sync` has let the gradients through."""
    optimizer.register_step_pre_hook(lambda *_: strike())


def watch(output: Tensor, strike: Callable[[], None]) -> None:
    output.register_hook(lambda _: strike())


PLACES = {
    "forward": arm_forward,
    "start of backward": arm_start_of_backward,
    "between buckets": arm_between_buckets,
    "optimizer": arm_optimizer,
}


@dataclass(frozen=True)
class Strikes:
    """Something befalls a rank at a place of a step."""

    victim: int
    step: int
    place: str
    strike: Callable[[], None]

    def __call__(self, rank: int, step: int, model: nn.Module, optimizer: Optimizer) -> None:
        if (rank, step) == (self.victim, self.step):
            PLACES[self.place](model, optimizer, self.strike)


def after_its_note(strike: Callable[[], None]) -> None:
    """Let the others be able to read how far this rank has come, then strike."""
    time.sleep(NOTE_S)
    strike()


killed = be_killed
killed_later = partial(after_its_note, be_killed)
stopped_later = partial(after_its_note, be_stopped)


def train_with_a_victim(fabric: Fabric, fault: Strikes, steps: int, folder: str) -> Trained:
    """Train until the victim is struck; when all others have said what they saw, the victim is removed."""
    pids = fabric.all_gather(torch.tensor([os.getpid()])).flatten().tolist()
    trained = train(fabric, steps, before_step=fault, **ONE_EACH)
    if fabric.rank != fault.victim:
        report_and_stay(fabric, folder)
        remove(pids[fault.victim])
    return trained


def train_with_an_absent_rank(fabric: Fabric, absent: int, step: int, folder: str) -> Trained:
    """One rank never comes to the backward pass of a step until the others have given up on it."""
    away = partial(wait_for_reports, folder, fabric.world - 1)
    trained = train(fabric, step, before_step=Strikes(absent, step, "forward", away), **ONE_EACH)
    if fabric.rank != absent:
        report_and_stay(fabric, folder)
    return trained


def remove(pid: int) -> None:
    """A stopped process would be waited for."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


# Endings


def train_until_interrupted(fabric: Fabric, folder: str) -> None:
    """Train for ever; leave a file named after this process once steps are being made."""
    model = filled(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    syncline.Sync(model, optimizer, fabric=fabric, **ONE_EACH)
    for step in range(1_000_000):
        optimizer.zero_grad()
        model(batch(fabric.rank, step)).square().mean().backward()
        optimizer.step()
        if step == 3:
            Path(folder, str(os.getpid())).touch()


def fail_in_backward(fabric: Fabric, rank: int, error: type[BaseException]) -> None:
    """A rank fails in the middle of its third backward pass, and nobody catches anything."""
    model = filled(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    syncline.Sync(model, optimizer, fabric=fabric, **ONE_EACH)
    for step in range(1, 6):
        if (fabric.rank, step) == (rank, 3):
            arm_between_buckets(model, optimizer, partial(fail, error))
        optimizer.zero_grad()
        model(batch(fabric.rank, step)).square().mean().backward()
        optimizer.step()


def fail(error: type[BaseException]) -> None:
    raise error("in the middle of backward")


def train_and_go_on_alone(fabric: Fabric) -> tuple[list[list[Tensor]], list[Tensor], int]:
    """Two steps together, two alone after `close`: parameters after each, what a model makes of the last two that was
    never synchronized, and how many hooks are left."""
    model = filled(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, **ONE_EACH)
    parameters = []
    for step in range(1, 5):
        if step == 3:
            sync.close()
            sync.close()
            alone = filled(Net())
            alone.load_state_dict(model.state_dict())
            other = torch.optim.SGD(alone.parameters(), lr=0.1)
        one_step(model, optimizer, batch(fabric.rank, step))
        if step > 2:
            one_step(alone, other, batch(fabric.rank, step))
        parameters.append(snapshot(model))
    return parameters, snapshot(alone), hooks_of(model, optimizer)


def hooks_of(model: nn.Module, optimizer: Optimizer) -> int:
    """How many hooks there are for steps and gradients."""
    of_parameters = [parameter._post_accumulate_grad_hooks or {} for parameter in model.parameters()]
    of_steps = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    return sum(map(len, [*of_parameters, *of_steps]))


def one_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor) -> None:
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


# Siblings


def outcome_and_error(call: Callable[[], object]) -> tuple[str, int | None, float]:
    """The type of the error that a call raised, the rank it blames, and how long that took."""
    started = time.monotonic()
    try:
        call()
    except Exception as error:
        culprit = error.rank if isinstance(error, PeerError) else None
        return type(error).__name__, culprit, time.monotonic() - started
    return "nothing", None, time.monotonic() - started


def start_in_opposite_orders(fabric: Fabric, turns: int) -> list[tuple[list[float], list[float]]]:
    """Even ranks start on the fabric first, odd ones on its sibling; nobody waits before both are started."""
    sibling = fabric.sibling()
    order = [fabric, sibling] if fabric.rank % 2 == 0 else [sibling, fabric]
    sums = []
    for turn in range(turns):
        tensors = {fabric: torch.full((1000,), 1.0 + fabric.rank), sibling: torch.full((10,), 100.0 * turn)}
        handles = []
        for one in order:
            handles.append(one.all_reduce_async(tensors[one]))
            time.sleep(0.02)
        for handle in handles:
            handle.wait()
        sums.append((tensors[fabric].unique().tolist(), tensors[sibling].unique().tolist()))
    return sums


def family_of(fabric: Fabric) -> list[Fabric]:
    """A child, a grandchild, and a second child."""
    child = fabric.sibling()
    return [child, child.sibling(), fabric.sibling()]


def use_a_family(fabric: Fabric) -> list[tuple[int, int, float]]:
    """Each member adds something else, all of them at the same time, in an order of its own on every rank."""
    family = [fabric, *family_of(fabric)]
    tensors = [torch.tensor([10.0**position * (1 + fabric.rank)]) for position in range(len(family))]
    starts = [(position + fabric.rank) % len(family) for position in range(len(family))]
    for handle in [family[position].all_reduce_async(tensors[position]) for position in starts]:
        handle.wait()
    return [(member.rank, member.world, tensor.item()) for member, tensor in zip(family, tensors, strict=True)]


def close_the_parent(fabric: Fabric, drain: bool) -> list[tuple[str, int | None, float]]:
    """How calls of a family end after its head was closed, which is done twice."""
    family = family_of(fabric)
    for member in family:
        member.barrier()
    fabric.barrier()
    fabric.close(drain)
    fabric.close(drain)
    calls = [member.barrier for member in [fabric, *family]]
    calls += [partial(start_and_wait, member) for member in [fabric, *family]]
    return [outcome_and_error(call) for call in calls]


def start_and_wait(fabric: Fabric) -> None:
    fabric.all_reduce_async(torch.ones(3)).wait()


def close_a_sibling_only(fabric: Fabric) -> tuple[tuple[str, int | None, float], float]:
    """The fabric that it was made from is still there."""
    sibling = fabric.sibling()
    sibling.barrier()
    sibling.close()
    return outcome_and_error(sibling.barrier), fabric.all_reduce(torch.tensor([1.0 + fabric.rank])).item()


def make_and_close_siblings(fabric: Fabric, count: int) -> tuple[int, int]:
    """How many more descriptors and threads there are after so many siblings have come and gone."""
    use_siblings(fabric, 1)
    before = resources()
    use_siblings(fabric, count)
    until = time.monotonic() + 5.0
    while resources() != before and time.monotonic() < until:
        time.sleep(0.02)
    return tuple(now - then for now, then in zip(resources(), before, strict=True))


def use_siblings(fabric: Fabric, count: int) -> None:
    siblings = [fabric.sibling() for _ in range(count)]
    for sibling in siblings:
        sibling.all_reduce_async(sibling.buffer(1000)).wait()
    for sibling in siblings:
        sibling.close()
    fabric.barrier()


def resources() -> tuple[int, int]:
    """Open descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


# Ending what is under way


@dataclass(frozen=True)
class Ended:
    """How long it took to close, and how calls ended: the error, the rank that it blames, and after how long."""

    closing_s: float
    calls: list[tuple[str, int | None, float]]


def close_while_under_way(fabric: Fabric, closes: int, start: tuple[int, ...], folder: str) -> Ended:
    """Some ranks start two calls that cannot end, because others do not; then one rank gives up."""
    fabric.barrier()
    handles = [fabric.all_reduce_async(torch.ones(10)) for _ in range(2)] if fabric.rank in start else []
    closing_s = 0.0
    if fabric.rank == closes:
        time.sleep(0.3)
        _, _, closing_s = outcome_and_error(partial(fabric.close, drain=False))
    elif not handles:
        wait_for_reports(folder, len({closes, *start}))
        return Ended(0.0, [outcome_and_error(fabric.barrier)])
    found = [outcome_and_error(handle.wait) for handle in handles]
    Path(folder, str(fabric.rank)).touch()
    wait_for_reports(folder, len({closes, *start}))
    return Ended(closing_s, found)


def close_with_patience(fabric: Fabric, late: int) -> tuple[float, bool]:
    """Close right after a call was started, for which another rank is late."""
    sibling = fabric.sibling()
    tensor = torch.full((1000,), 1.0 + fabric.rank)
    if fabric.rank == late:
        time.sleep(0.3)
    handle = sibling.all_reduce_async(tensor)
    sibling.close()
    done = handle.done()
    handle.wait()
    return tensor.mean().item(), done


# Notes


def notes_seen(fabric: Fabric, expected: list[tuple[int, int, int, int]], within_s: float) -> list:
    """The notes of all ranks, as soon as they are those that are expected."""
    until = time.monotonic() + within_s
    while (seen := [fabric.note_of(rank) for rank in range(fabric.world)]) != expected and time.monotonic() < until:
        time.sleep(0.05)
    return seen


def note_for(rank: int, turn: int) -> tuple[int, int, int, int]:
    return rank + 1, turn, 2**40 + rank, 4


def exchange_notes(fabric: Fabric, within_s: float) -> list[list]:
    """What is seen before anybody has written, and after each of two turns."""
    everyone = range(fabric.world)
    sibling = fabric.sibling()
    seen = [[fabric.note_of(rank) for rank in everyone]]
    for turn in (1, 2):
        fabric.barrier()
        fabric.write_note(note_for(fabric.rank, turn))
        seen.append(notes_seen(fabric, [note_for(rank, turn) for rank in everyone], within_s))
    seen.append([sibling.note_of(rank) for rank in everyone])
    fabric.barrier()
    return seen


def read_the_note_of_a_stopped_rank(fabric: Fabric, victim: int, folder: str) -> tuple[str, tuple, float]:
    """The state of the process of the victim, its note, and how long it took to read it."""
    pids = fabric.all_gather(torch.tensor([os.getpid()])).flatten().tolist()
    if fabric.rank == victim:
        fabric.write_note((7, 8, 9, 10))
        time.sleep(NOTE_S)
        be_stopped()
    state = wait_for_state(pids[victim], "T")
    started = time.monotonic()
    note = fabric.note_of(victim)
    seconds = time.monotonic() - started
    report_and_stay(fabric, folder)
    remove(pids[victim])
    return state, note, seconds


def wait_for_state(pid: int, wanted: str) -> str:
    """The state of a process, when it is the one that is wanted or after far too long."""
    until = time.monotonic() + 20.0
    while (state := process_at(Path(f"/proc/{pid}")).state) != wanted and time.monotonic() < until:
        time.sleep(0.02)
    return state


# Times


def times_with_a_late_rank(fabric: Fabric, late: int, seconds: float) -> list[int]:
    """Of one call: the clock before it, its three times, and the clock after it."""
    fabric.all_reduce_async(torch.ones(10)).wait()
    fabric.barrier()
    if fabric.rank == late:
        time.sleep(seconds)
    before = time.monotonic_ns()
    handle = fabric.all_reduce_async(torch.ones(1000))
    handle.wait()
    return [before, *handle.times(), time.monotonic_ns()]


def times_of_many(fabric: Fabric, count: int) -> list[list[int]]:
    """Of calls that were started one right after the other."""
    handles = [fabric.all_reduce_async(torch.ones(10_000)) for _ in range(count)]
    for handle in handles:
        handle.wait()
    return [list(handle.times()) for handle in handles]


def notes_seen_beyond(fabric: Fabric) -> None:
    """Ask for a rank that is not there."""
    fabric.note_of(fabric.world)


# Spans

SLEEP_S = 0.2


def spans_of_training(fabric: Fabric, steps: int, slow: int = -1) -> list[StepSpan]:
    """The spans of every step; one rank may be slow in its forward pass."""
    model = filled(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = syncline.Sync(model, optimizer, fabric=fabric, **ONE_EACH)
    if fabric.rank == slow:
        arm_forward(model, optimizer, partial(time.sleep, SLEEP_S))
    for step in range(1, steps + 1):
        one_step(model, optimizer, batch(fabric.rank, step))
    return list(sync.recorder.steps)
