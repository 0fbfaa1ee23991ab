"""Batch normalization over all ranks equals one process with all batches."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import syncline
from syncline.batch_norm import SyncBatchNorm
from syncline.errors import ConfigError


def batch_of(rank: int, shape: tuple[int, ...]) -> Tensor:
    """Of another size on every rank, far from zero, so that sums of squares would lose their digits."""
    generator = torch.Generator().manual_seed(rank)
    batch = torch.randn(2 + rank, 3, *shape, generator=generator, dtype=torch.float64)
    return batch * (1 + rank) + 100 * rank


def layer(**settings: object) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(3, dtype=torch.float64, **settings)
    if made.affine:
        made.weight.data = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
        made.bias.data = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)
    return made


def loss_of(output: Tensor) -> Tensor:
    return output.pow(3).sum() + output.sin().sum()


def results(normalize: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Output, gradients and statistics after two steps."""
    x = batch.clone().requires_grad_()
    for _ in range(2):
        x.grad = None
        normalize.zero_grad()
        output = normalize(x)
        loss_of(output).backward()
    found = {"output": output.detach(), "input": x.grad}
    found |= {name: parameter.grad for name, parameter in normalize.named_parameters()}
    return found | dict(normalize.named_buffers())


def copy_and_save(fabric: syncline.Fabric) -> tuple[Tensor, Tensor, str]:
    """What a layer, its copy and one from a file make of the same batch."""
    made = syncline.convert_batch_norm(layer())
    copied = copy.deepcopy(made)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    batch = batch_of(fabric.rank, (4, 5))
    with pytest.raises(ConfigError) as caught:
        loaded(batch)
    assert torch.equal(loaded.eval()(batch), copy.deepcopy(made).eval()(batch))
    return made(batch), copied(batch), str(caught.value)


def test_copies_normalize_with_all_ranks_and_what_was_saved_says_how_to() -> None:
    for original, copied, text in syncline.run(copy_and_save, 2, "threads"):
        assert torch.equal(original, copied)
        assert "comes from a file; train with convert_batch_norm(model)" in text


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(), (4,), (4, 5)])
@pytest.mark.parametrize("settings", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}])
def test_all_ranks_together_are_one_process_with_all_batches(
    world: int, shape: tuple[int, ...], settings: dict
) -> None:
    kind = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(shape)]
    plain = kind(3, dtype=torch.float64, **settings)
    batches = [batch_of(rank, shape) for rank in range(world)]

    def on_rank(fabric: syncline.Fabric) -> dict[str, Tensor]:
        converted = syncline.convert_batch_norm(nn.Sequential(copy.deepcopy(plain)))[0]
        assert isinstance(converted, SyncBatchNorm)
        return results(converted, batches[fabric.rank])

    by_rank = syncline.run(on_rank, ranks=world, fabric="threads")
    wanted = results(copy.deepcopy(plain), torch.cat(batches))
    for name, exact in wanted.items():
        found = [result[name] for result in by_rank]
        if name in ("output", "input"):
            torch.testing.assert_close(torch.cat(found), exact, rtol=1e-9, atol=1e-9)
        elif name in ("weight", "bias"):
            torch.testing.assert_close(torch.stack(found).sum(0), exact, rtol=1e-9, atol=1e-9)
        else:
            for one in found:
                torch.testing.assert_close(one, exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("with_rows", [[], [0], [1]])
@pytest.mark.parametrize("settings", [{}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}])
def test_empty_batches_are_those_of_one_process(world: int, with_rows: list[int], settings: dict) -> None:
    plain = nn.BatchNorm2d(3, dtype=torch.float64, **settings)
    usual = [batch_of(rank, (4, 5)) for rank in range(world)]
    some = [batch if rank in with_rows else batch[:0] for rank, batch in enumerate(usual)]

    def on_rank(fabric: syncline.Fabric) -> list[dict[str, Tensor]]:
        converted = syncline.convert_batch_norm(copy.deepcopy(plain))
        return [copy.deepcopy(results(converted, batches[fabric.rank])) for batches in (some, usual)]

    alone = copy.deepcopy(plain)
    wanted = [copy.deepcopy(results(alone, torch.cat(batches))) for batches in (some, usual)]
    for found in syncline.run(on_rank, ranks=world, fabric="threads"):
        for one, exact in zip(found, wanted, strict=True):
            assert all(tensor.isfinite().all() for tensor in one.values())
            for name, _ in plain.named_buffers():
                torch.testing.assert_close(one[name], exact[name], rtol=1e-9, atol=1e-9)


def test_one_value_for_each_channel_is_refused_as_one_process_does() -> None:
    def on_rank(fabric: syncline.Fabric) -> str:
        converted = syncline.convert_batch_norm(nn.BatchNorm1d(3))
        with pytest.raises(ValueError, match="one value for each channel") as caught:
            converted(torch.ones(1 - fabric.rank, 3))
        assert converted.num_batches_tracked == 0
        return str(caught.value)

    assert all("batches of all 2 ranks" in said for said in syncline.run(on_rank, ranks=2, fabric="threads"))


def test_in_eval_the_stored_statistics_are_used() -> None:
    plain = layer().eval()
    plain.running_mean.fill_(3.0)

    def on_rank(fabric: syncline.Fabric) -> Tensor:
        converted = syncline.convert_batch_norm(copy.deepcopy(plain))
        assert not converted.training
        return converted(batch_of(fabric.rank, (4, 4))).detach()

    for rank, output in enumerate(syncline.run(on_rank, ranks=2, fabric="threads")):
        torch.testing.assert_close(output, plain(batch_of(rank, (4, 4))))


def test_a_model_with_it_trains_as_one_process_with_all_batches() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).double()
    batches = [torch.randn(5, 3, 4, 4, dtype=torch.float64) for _ in range(2)]

    def steps(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> list[Tensor]:
        for _ in range(4):
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            optimizer.step()
        return [value.detach() for value in net.state_dict().values()]

    def on_rank(fabric: syncline.Fabric) -> list[Tensor]:
        net = syncline.convert_batch_norm(copy.deepcopy(model))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        syncline.Sync(net, optimizer)
        return steps(net, optimizer, batches[fabric.rank])

    by_rank = syncline.run(on_rank, ranks=2, fabric="threads")
    alone = copy.deepcopy(model)
    wanted = steps(alone, torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), torch.cat(batches))
    for found in by_rank:
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_torchs_own_is_refused_where_it_cannot_work() -> None:
    def on_rank(fabric: syncline.Fabric) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
        with pytest.raises(ConfigError, match="convert_batch_norm"):
            syncline.Sync(model, torch.optim.SGD(model.parameters(), lr=0.1))

    syncline.run(on_rank, ranks=2, fabric="threads")


def test_ranks_that_share_statistics_cannot_have_different_numbers_of_batches() -> None:
    def on_rank(fabric: syncline.Fabric) -> None:
        net = syncline.convert_batch_norm(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        sync = syncline.Sync(net, torch.optim.SGD(net.parameters(), lr=0.1))
        with (
            pytest.raises(ConfigError, match=r"1 normalizes over the batches of all ranks.* join\(\) is not"),
            sync.join(),
        ):
            pass

    syncline.run(on_rank, ranks=2, fabric="threads")
