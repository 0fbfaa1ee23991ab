"""Requests that make no sense are refused, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import syncline
from support import faulty
from support.catalogue import PROCESS_FABRICS, one_now_others_slow
from support.guarded import Net, filled, snapshot
from support.replicas import same
from syncline.errors import ConfigError, Desync, PairingError, UnknownName
from syncline.fabric.base import Fabric
from syncline.fabric.threads import Threads


@pytest.fixture
def alone() -> Iterator[Fabric]:
    """A world of one."""
    with Threads().group(1).fabric(0) as fabric:
        yield fabric


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"bucket_bytes": -5}, ConfigError, "bucket_bytes=-5 is less than 1"),
        ({"first_bucket_bytes": 0}, ConfigError, "first_bucket_bytes=0 is less than 1"),
        ({"accumulate": 0}, ConfigError, "accumulate=0 is less than 1"),
        ({"check_every": -1}, ConfigError, "check_every=-1 is less than 0"),
        ({"accumulate": 1.5}, ConfigError, "accumulate=1.5 is not a whole number"),
        ({"bucket_bytes": "25MB"}, ConfigError, "bucket_bytes='25MB' is not a whole number"),
        ({"seed": None}, ConfigError, "seed=None is not a whole number"),
        ({"most_skips": -1}, ConfigError, "most_skips=-1 is less than 0"),
        ({"buffers": "mean"}, UnknownName, "unknown buffers 'mean'"),
        ({"nonfinite": "x"}, UnknownName, "unknown nonfinite 'x'; known: ignore, raise, skip"),
        ({"collective": "rign"}, UnknownName, "unknown collective 'rign'; did you mean ring"),
        ({"fabric": "shmm"}, UnknownName, "unknown fabric 'shmm'; did you mean shm"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_refused_with_its_value_and_the_rule(
    alone: Fabric, settings: dict, error: type[ConfigError], text: str
) -> None:
    model = Net()
    with pytest.raises(error) as caught:
        syncline.Sync(model, torch.optim.SGD(model.parameters()), **{"fabric": alone, **settings})
    assert text in str(caught.value)


def schedule_of(model: nn.Module) -> object:
    return torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda model: model.parameters(), "Parameter"),
        (lambda model: "sgd", "str"),
        (lambda model: None, "NoneType"),
        (lambda model: torch.optim.SGD, "type"),
        (schedule_of, "ConstantLR"),
        (lambda model: [torch.optim.SGD(model.parameters()), None], "NoneType"),
    ],
)
def test_what_is_no_optimizer_is_refused(alone: Fabric, make: Callable, name: str) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=rf"{name} is not a torch\.optim\.Optimizer"):
        syncline.Sync(model, make(model), fabric=alone)


@pytest.mark.parametrize("mode", ["delayed", "async", "bounded"])
def test_optimizers_that_need_a_closure_are_refused_where_there_is_none(alone: Fabric, mode: str) -> None:
    model = Net()
    optimizers = [torch.optim.SGD(model.first.parameters()), torch.optim.LBFGS(model.second.parameters())]
    torch.optim.lr_scheduler.ConstantLR(optimizers[1])  # which wraps its step
    with pytest.raises(PairingError, match=f"LBFGS evaluates a closure in its step, which mode={mode} cannot do"):
        syncline.Sync(model, optimizers, fabric=alone, mode=mode)
    assert faulty.hooks_of(model, optimizers[0]) == 0


def test_no_optimizer_at_all_is_refused(alone: Fabric) -> None:
    with pytest.raises(ConfigError, match="no optimizer was given"):
        syncline.Sync(Net(), [], fabric=alone)


def test_a_list_of_models_is_refused(alone: Fabric) -> None:
    model = Net()
    with pytest.raises(ConfigError, match=r"list is not a torch\.nn\.Module; put several models in an nn\.ModuleList"):
        syncline.Sync([model], torch.optim.SGD(model.parameters()), fabric=alone)


def step_in_backward(fabric: Fabric) -> str:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    syncline.Sync(model, optimizer, fabric=fabric)
    model.first.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(ConfigError) as caught:
        model(torch.ones(2, 6)).sum().backward()
    return str(caught.value)


def test_a_step_inside_backward_is_refused() -> None:
    for text in syncline.run(step_in_backward, 2, "threads"):
        assert "optimizer.step() was called in the middle of backward()" in text


def change_type(fabric: Fabric) -> str:
    """A converted parameter accumulates in another node of the graph, so it is the step that finds out."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    syncline.Sync(model, optimizer, fabric=fabric)
    model(torch.ones(2, 6)).sum().backward()
    model.double().zero_grad()
    model(torch.ones(2, 6).double()).sum().backward()
    with pytest.raises(ConfigError) as caught:
        optimizer.step()
    return str(caught.value)


def test_a_model_that_was_converted_is_refused() -> None:
    for text in syncline.run(change_type, 2, "threads"):
        assert "was float32 and is float64 now; convert the model before Sync" in text


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    optimizer.zero_grad()
    model(torch.full((2, 6), 1.0 + rank)).square().sum().backward()
    optimizer.step()


def add_a_layer(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.fourth = nn.Linear(4, 2)
    model.third = nn.Sequential(model.third, model.fourth)
    optimizer.add_param_group({"params": list(model.fourth.parameters())})


def replace_a_layer(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.third = nn.Linear(8, 4)
    optimizer.param_groups[0]["params"][-2:] = list(model.third.parameters())


def assign_another_state(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(Net().state_dict(), assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def change_and_step(fabric: Fabric, change: Callable, mode: str) -> str:
    """What is said of a model that is another one in the second step."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    syncline.Sync(model, optimizer, fabric=fabric, mode=mode)
    step_once(model, optimizer, fabric.rank)
    change(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ConfigError) as caught:
        step_once(model, optimizer, fabric.rank)
    assert mode != "sync" or all(map(torch.equal, before, model.parameters()))
    return str(caught.value)


@pytest.mark.parametrize("mode", ["sync", "delayed", "async", "local:1"])
@pytest.mark.parametrize(
    ("change", "name", "text"),
    [
        (add_a_layer, "third.1.weight", "came to the model and the optimizer after this Sync was made"),
        (replace_a_layer, "third.weight", "is not the parameter any more that it was when this Sync was made"),
        (assign_another_state, "first.weight", "is not the parameter any more that it was when this Sync was made"),
    ],
)
def test_parameters_that_come_after_sync_are_refused(change: Callable, name: str, text: str, mode: str) -> None:
    for said in syncline.run(partial(change_and_step, change=change, mode=mode), 2, "threads"):
        assert said.startswith(f"{name} ")
        assert text in said or mode in ("local:1", "async")
        assert "make another" in said


def unfreeze_apart(fabric: Fabric, wanted: list[list[str]], mode: str, codec: str) -> tuple[list[str], list[Tensor]]:
    """What is said in two steps, and in one that is tried after it, when ranks unfreeze what each of them wants."""
    model = filled(Net())
    model.first.requires_grad_(False)
    model.second.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    syncline.Sync(model, optimizer, fabric=fabric, mode=mode, codec=codec)
    step_once(model, optimizer, fabric.rank)
    for name in wanted[fabric.rank]:
        model.get_parameter(name).requires_grad_(True)
    said = []
    for attempt in (step_once, step_once, lambda *_: optimizer.step()):
        try:
            attempt(model, optimizer, fabric.rank)
        except Desync as error:
            said.append(str(error))
    return said, snapshot(model)


def assert_refused_apart(fabric: str, wanted: list[list[str]], text: str, mode: str, codec: str) -> None:
    """All ranks say the same, from the pass in which ranks came apart on, and keep the same parameters."""
    ranks = syncline.run(partial(unfreeze_apart, wanted=wanted, mode=mode, codec=codec), len(wanted), fabric)
    for said, parameters in ranks:
        assert len(said) == 3
        assert len(set(said)) == 1
        assert f"in step 2: {text}" in said[0]
        assert "requires_grad_(True) before the same step on all ranks" in said[0]
        assert same(parameters, ranks[0][1])


@pytest.mark.parametrize(("mode", "codec"), [("sync", "none"), ("sync", "topk:0.5"), ("delayed", "none")])
@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ([["first.weight"], ["second.bias"]], "first.weight by rank 0 and not by rank 1; second.bias by rank 1 and"),
        ([["first.bias", "second.bias"], [], ["second.bias"]], "first.bias by rank 0 and not by ranks 1, 2; second"),
    ],
)
def test_ranks_that_unfreeze_different_parameters_are_refused(
    wanted: list[list[str]], text: str, mode: str, codec: str
) -> None:
    assert_refused_apart("threads", wanted, text, mode, codec)


@pytest.mark.parametrize("mode", ["sync", "delayed"])
@pytest.mark.parametrize("fabric", ["threads", *one_now_others_slow(PROCESS_FABRICS)])
def test_unfreezing_on_one_rank_is_an_error_that_names_the_parameter_and_the_rank(fabric: str, mode: str) -> None:
    wanted = [[], ["first.weight", "first.bias"]]
    assert_refused_apart(fabric, wanted, "first.weight, first.bias by rank 1 and not by rank 0", mode, "none")


def step_with_outsiders(fabric: Fabric) -> None:
    model, outsider, other = Net(), nn.Linear(4, 3), nn.Linear(3, 1)
    chain = nn.Sequential(model, outsider, other)
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    for part in (model, other):
        syncline.Sync(part, optimizer, fabric=fabric)
    for _ in range(3):
        step_once(chain, optimizer, fabric.rank)


def test_an_optimizer_that_changes_what_no_sync_has_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    syncline.run(step_with_outsiders, 2, "threads")
    said = [record.getMessage() for record in caplog.records if "in no model with a Sync" in record.getMessage()]
    assert len(said) == 2 * 2  # by each rank, for each Sync
    assert "also changes 2 parameters, the first of shape [3, 4]" in said[0]


def test_a_model_without_trainable_parameters_is_refused(alone: Fabric) -> None:
    model = Net().requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter of the model needs a gradient"):
        syncline.Sync(model, torch.optim.SGD(model.parameters()), fabric=alone)


def test_complex_parameters_are_refused_by_name(alone: Fabric) -> None:
    model = Net()
    model.second = nn.Linear(8, 8, dtype=torch.complex64)
    with pytest.raises(ConfigError, match=r"second\.weight is complex64; gradients can be of float32, float64"):
        syncline.Sync(model, torch.optim.SGD(model.parameters()), fabric=alone)


def unfreeze_complex(fabric: Fabric, mode: str) -> str:
    model = nn.Linear(3, 3)
    model.factor = nn.Parameter(torch.ones(3, dtype=torch.complex64), requires_grad=False)
    optimizer = torch.optim.SGD(model.parameters())
    syncline.Sync(model, optimizer, fabric=fabric, mode=mode)

    def steps(number: int) -> None:
        for _ in range(number):
            (model(torch.ones(2, 3)) * model.factor).abs().sum().backward()
            optimizer.step()

    steps(1)
    model.factor.requires_grad_(True)
    with pytest.raises(ConfigError) as caught:
        steps(2)  # of which the second one judges the first, where that is delayed
    return str(caught.value)


@pytest.mark.parametrize("mode", ["sync", "delayed", "local:1", "async"])
def test_complex_parameters_that_are_unfrozen_are_refused_by_name(mode: str) -> None:
    for said in syncline.run(partial(unfreeze_complex, mode=mode), 2, "threads"):
        assert said.startswith("factor ")
        assert "is complex64; gradients can be of" in said or mode in ("local:1", "async")


@pytest.mark.parametrize("mode", ["sync", "delayed", "local:1", "async"])
@pytest.mark.parametrize(
    ("lazy", "name"), [(nn.LazyLinear(3), "1.weight"), (nn.LazyBatchNorm1d(affine=False), "1.running_mean")]
)
def test_lazy_parameters_and_buffers_are_refused_by_name(alone: Fabric, lazy: nn.Module, name: str, mode: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), lazy)
    optimizer = torch.optim.SGD(model[0].parameters())
    with pytest.raises(ConfigError, match=rf"{name} is of a lazy module and has no shape yet; let the model see"):
        syncline.Sync(model, optimizer, fabric=alone, mode=mode)
    assert faulty.hooks_of(model[0], optimizer) == 0
    assert alone.children == []


def test_lazy_batch_normalization_is_refused_by_name_and_other_lazy_layers_are_not(alone: Fabric) -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.BatchNorm1d(2), nn.LazyBatchNorm1d())
    with pytest.raises(ConfigError, match=r"2\.weight is of a lazy module and has no shape yet"):
        syncline.convert_batch_norm(model, alone)
    assert isinstance(model[1], nn.BatchNorm1d)
    syncline.convert_batch_norm(model[:2], alone)


class FSDPModule(nn.Linear):
    """Called as the base class of a module that `fully_shard` has changed."""


def test_a_model_that_fsdp_shards_is_refused(alone: Fabric) -> None:
    model = nn.Sequential(FSDPModule(2, 2))
    with pytest.raises(ConfigError, match="0 is sharded by FSDP, which averages gradients itself"):
        syncline.Sync(model, torch.optim.SGD(model.parameters()), fabric=alone)


def test_a_refused_request_leaves_no_hooks(alone: Fabric) -> None:
    model = Net().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError):
        syncline.Sync(model, optimizer, fabric=alone)
    assert faulty.hooks_of(model, optimizer) == 0
    assert alone.children == []


def test_a_closed_sync_goes_on_from_nothing() -> None:
    model = nn.Linear(2, 2)
    sync = syncline.Sync(model, torch.optim.SGD(model.parameters(), lr=0.1), codec="dgc")
    saved = sync.state_dict()
    sync.close()
    with pytest.raises(ConfigError, match="this Sync is closed"):
        sync.load_state_dict(saved)
