"""Loops with unusual optimizers and models, which the divergence guard looks at. Light: ranks import it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import syncline
from support.batches import fill
from support.guarded import Net, batch, filled
from syncline.errors import SynclineError
from syncline.modes.gradients import GradientDriver


class Ended(NamedTuple):
    """How a loop ended on one rank."""

    error: str
    comparisons: int
    weights: list[Tensor]


Loop = Callable[[syncline.Fabric], tuple[syncline.Sync, nn.Module, Callable[[int], None]]]


def run_loop(fabric: syncline.Fabric, loop: Loop, steps: int = 8) -> Ended:
    """Steps of a loop, until the first error."""
    sync, model, step = loop(fabric)
    error = ""
    try:
        for number in range(steps):
            step(number)
        sync.close()
    except SynclineError as raised:
        error = f"{type(raised).__name__}: {raised}"
    driver = sync.driver
    driver = getattr(driver, "gradients", driver)
    assert isinstance(driver, GradientDriver)
    comparisons = driver.guard.comparisons if driver.guard is not None else 0
    return Ended(error, comparisons, [parameter.detach().clone() for parameter in model.parameters()])


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    return model(batch(rank, number)).square().mean()


def lbfgs(fabric: syncline.Fabric) -> Any:
    """Several passes in every step, between which it moves parameters, and it replaces its state."""
    model = filled(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def step(number: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, fabric.rank, number)
            loss.backward()
            return loss

        optimizer.step(closure)

    return syncline.Sync(model, optimizer, fabric=fabric), model, step


def sharpness_aware(fabric: syncline.Fabric) -> Any:
    """Parameters are moved before the second pass of every step, and back."""
    model = filled(Net())
    optimizer = SGD(model.parameters(), lr=0.1)

    @torch.no_grad()
    def move(sign: float, by: list[Tensor]) -> None:
        for parameter, one in zip(model.parameters(), by, strict=True):
            parameter.add_(one, alpha=sign * 0.05)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, fabric.rank, number).backward()
        uphill = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        move(1.0, uphill)
        optimizer.zero_grad()
        loss_of(model, fabric.rank, number).backward()
        move(-1.0, uphill)
        optimizer.step()

    return syncline.Sync(model, optimizer, fabric=fabric), model, step


def with_a_teacher(fabric: syncline.Fabric) -> Any:
    """Half of the model follows the other half, in place, after every step."""
    both = nn.ModuleList([filled(Net()), filled(Net())])
    both[1].requires_grad_(False)
    optimizer = Adam(both[0].parameters(), lr=0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(both[0], fabric.rank, number).backward()
        optimizer.step()
        with torch.no_grad():
            for teacher, student in zip(both[1].parameters(), both[0].parameters(), strict=True):
                teacher.lerp_(student, 0.1)

    return syncline.Sync(both, optimizer, fabric=fabric), both, step


def adversaries(fabric: syncline.Fabric) -> Any:
    """Two optimizers, and a critic that is clamped after each of its steps."""
    both = nn.ModuleList([filled(nn.Linear(6, 6)), filled(nn.Linear(6, 1))])
    optimizers = [Adam(both[0].parameters(), lr=0.01), Adam(both[1].parameters(), lr=0.01)]

    def step(number: int) -> None:
        which = int(number % 3 != 0)
        both.zero_grad()
        made = both[0](batch(fabric.rank, number))
        loss = both[1](made).mean() - both[1](batch(fabric.rank, number + 100)).mean()
        (loss if which else -loss).backward()
        optimizers[which].step()
        if which:
            with torch.no_grad():
                for parameter in both[1].parameters():
                    parameter.clamp_(-0.1, 0.1)

    return syncline.Sync(both, optimizers, fabric=fabric), both, step


class Words(nn.Module):
    """An embedding that scales the rows that a rank looks up, and those only."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, max_norm=0.5)
        self.last = nn.Linear(6, 4)

    def forward(self, words: Tensor) -> Tensor:
        return self.last(self.table(words))


def rows_of_bounded_norm(fabric: syncline.Fabric) -> Any:
    model = fill(Words(), seed=0)
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.arange(5 * fabric.rank, 5 * fabric.rank + 5)).square().mean().backward()
        optimizer.step()

    return syncline.Sync(model, optimizer, fabric=fabric), model, step


class Functional(Optimizer):
    """Makes new tensors of its state in every step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                before = self.state[parameter].get("mean", torch.zeros_like(parameter))
                self.state[parameter]["mean"] = 0.9 * before + parameter.grad
                parameter.sub_(self.state[parameter]["mean"], alpha=0.1)


class Sharded(Optimizer):
    """Every rank keeps the state of some parameters, steps with these, and gives them to the others."""

    def __init__(self, parameters: Any, fabric: syncline.Fabric) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.fabric = fabric

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if number % self.fabric.world == self.fabric.rank:
                kept = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                kept.mul_(0.9).add_(parameter.grad)
                parameter.sub_(kept, alpha=0.1)
            self.fabric.broadcast(parameter.data, number % self.fabric.world)


def simple_step(fabric: syncline.Fabric, model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
    def step(number: int) -> None:
        optimizer.zero_grad()
        loss_of(model, fabric.rank, number).backward()
        optimizer.step()

    return step


def functional(fabric: syncline.Fabric) -> Any:
    model = filled(Net())
    optimizer = Functional(model.parameters())
    return syncline.Sync(model, optimizer, fabric=fabric), model, simple_step(fabric, model, optimizer)


def sharded(fabric: syncline.Fabric) -> Any:
    model = filled(Net())
    optimizer = Sharded(model.parameters(), fabric.subgroup())
    return syncline.Sync(model, optimizer, fabric=fabric), model, simple_step(fabric, model, optimizer)


def with_strangers(fabric: syncline.Fabric) -> Any:
    """The optimizer also has parameters that no Sync knows, which are others on every rank."""
    model, own = filled(Net()), nn.Parameter(torch.full((3,), float(fabric.rank)))
    optimizer = Adam([*model.parameters(), own], lr=0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        (loss_of(model, fabric.rank, number) + own.square().sum()).backward()
        optimizer.step()

    return syncline.Sync(model, optimizer, fabric=fabric), model, step


def zero_redundancy(fabric: syncline.Fabric) -> Any:
    """Torch's own sharded optimizer, over the process group of the fabric. One rank has all of its state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = filled(nn.Linear(6, 4, bias=False))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Adam, lr=0.01)
    train = simple_step(fabric, model, optimizer)

    def step(number: int) -> None:
        if number == 4:
            saved = {}
            for rank in range(fabric.world):
                optimizer.consolidate_state_dict(to=rank)
                saved = optimizer.state_dict() if rank == fabric.rank else saved
            optimizer.load_state_dict(saved)
        train(number)

    return syncline.Sync(model, optimizer, fabric=fabric), model, step


def one_evaluates_alone(fabric: syncline.Fabric) -> Any:
    """With delayed gradients it uses the last ones before the others do."""
    model = filled(Net())
    optimizer = Adam(model.parameters(), lr=0.01)
    train = simple_step(fabric, model, optimizer)

    def step(number: int) -> None:
        train(number)
        if fabric.rank == 0 and number % 3 == 1:
            model.eval()
            model(batch(0, number))
            model.train()

    return syncline.Sync(model, optimizer, fabric=fabric, mode="delayed"), model, step


# One element of a model that has several windows of the rolling digest, at a rate of 0, so that nothing follows from it

LARGE = 256


def large(fabric: syncline.Fabric, edit: Callable[[nn.Module, int], None], mode: str = "sync") -> Any:
    model = fill(nn.Sequential(nn.Linear(6, LARGE), nn.Linear(LARGE, LARGE), nn.Linear(LARGE, 4)), seed=0)
    optimizer = Adam(model.parameters(), lr=0.0)
    train = simple_step(fabric, model, optimizer)

    def step(number: int) -> None:
        edit(model, number)
        train(number)

    return syncline.Sync(model, optimizer, fabric=fabric, mode=mode), model, step


def edited_without_version(fabric: syncline.Fabric) -> Any:
    def edit(model: nn.Module, number: int) -> None:
        if number == 2 and fabric.rank == 1:
            model[1].weight.data[200, 100] += 1.0

    return large(fabric, edit)


def edited_differently(fabric: syncline.Fabric, mode: str = "sync") -> Any:
    """All ranks change the same element, equally often, to different values."""

    @torch.no_grad()
    def edit(model: nn.Module, number: int) -> None:
        if number == 2:
            model[1].weight[200, 100] += fabric.rank

    return large(fabric, edit, mode)


def loaded_differently(fabric: syncline.Fabric) -> Any:
    def edit(model: nn.Module, number: int) -> None:
        if number == 2:
            saved = {name: weights.clone() for name, weights in model[1].state_dict().items()}
            saved["weight"][200, 100] = fabric.rank
            model[1].load_state_dict(saved)

    return large(fabric, edit)


def began_differently(fabric: syncline.Fabric) -> Any:
    """The states of optimizers differ in one element when Sync is made."""
    model = fill(nn.Sequential(nn.Linear(6, LARGE), nn.Linear(LARGE, LARGE), nn.Linear(LARGE, 4)), seed=0)
    optimizer = Adam(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[model[1].weight]["exp_avg"][200, 100] += fabric.rank
    return syncline.Sync(model, optimizer, fabric=fabric), model, simple_step(fabric, model, optimizer)


def one_of_many_is_loaded(fabric: syncline.Fabric, layer: int) -> Any:
    """Every rank loads other weights into one of so many small layers that not all of them are watched."""
    layers = [nn.Linear(6, 4), *(nn.Linear(4, 4, bias=False) for _ in range(300))]
    model = fill(nn.Sequential(*layers), seed=0)
    optimizer = Adam(model.parameters(), lr=0.0)
    train = simple_step(fabric, model, optimizer)

    def step(number: int) -> None:
        if number == 2:
            saved = {"weight": model[layer].weight.detach() + fabric.rank}
            model[layer].load_state_dict(saved)
        train(number)

    return syncline.Sync(model, optimizer, fabric=fabric), model, step
