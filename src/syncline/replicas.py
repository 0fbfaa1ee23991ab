"""Making replicas equal: what ranks have in common is compared, and the state of one of them is given to all."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from difflib import unified_diff
from typing import Any

import torch
from torch import Tensor, nn

from syncline.core.message import read_message, write_message
from syncline.errors import ConfigError, LayoutMismatch
from syncline.fabric.base import Fabric

log = logging.getLogger(__name__)
AT_A_TIME_BYTES = 25 << 20
WORD_BYTES = 8
SHARDING = ("ZeroRedundancyOptimizer", "OSS")  # optimizers, of torch and of fairscale
SHARDS = ("DTensor", "ShardedTensor")  # kinds of tensors


def compare_layouts(fabric: Fabric, lines: Sequence[str]) -> None:
    """Raise `LayoutMismatch` on every rank, with what differs, unless all ranks have the same."""
    text = "\n".join(lines)
    if all_have(fabric, text):
        return
    texts = gather_texts(fabric, text)
    others = [rank for rank, theirs in enumerate(texts) if theirs != texts[0]]
    raise layout_mismatch(0, texts[0].splitlines(), others[0], texts[others[0]].splitlines(), others)


def all_have(fabric: Fabric, text: str) -> bool:
    """Whether the text of all ranks is the same."""
    digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    digests = fabric.all_gather(torch.tensor([digest], device=fabric.device)).flatten().tolist()
    return len(set(digests)) == 1


def layout_mismatch(
    rank: int, lines: Sequence[str], other: int, others_lines: Sequence[str], others: Sequence[int] = ()
) -> LayoutMismatch:
    """The error that shows how one rank differs from another."""
    difference = list(unified_diff(lines, others_lines, f"rank {rank}", f"rank {other}", lineterm="", n=1))
    return LayoutMismatch(
        f"ranks {[*others] or [other]} differ from rank {rank}, so nothing was synchronized. What rank {other} has:\n"
        + "\n".join(difference[:60])
        + "\nBuild the same model and optimizer with the same settings on every rank."
    )


def gather_texts(fabric: Fabric, text: str) -> list[str]:
    """Everyone's text."""
    mine = text.encode()
    lengths = fabric.all_gather(torch.tensor([len(mine)], device=fabric.device)).flatten().tolist()
    words = torch.zeros(max(lengths), dtype=torch.int32)
    words[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else words[:0]
    gathered = fabric.all_gather(words.to(fabric.device)).cpu()
    return [bytes(row[:length].tolist()).decode() for row, length in zip(gathered, lengths, strict=True)]


def broadcast_tensors(fabric: Fabric, tensors: Iterable[Tensor], root: int = 0) -> None:
    """Give the tensors of one rank to all, whatever their dtypes and layouts, many in one message."""
    for batch in batches(tensors):
        packed = pack(batch).to(fabric.device)
        fabric.broadcast(packed, root)
        if fabric.rank != root:
            unpack(packed.cpu() if batch[0].device.type == "cpu" else packed, batch)


def batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors that fit in one message, on one device."""
    batch: list[Tensor] = []
    for tensor in tensors:
        full = sum(one.nbytes for one in batch) + tensor.nbytes > AT_A_TIME_BYTES
        if batch and (full or batch[0].device != tensor.device):
            yield batch
            batch = []
        batch.append(tensor)
    if batch:
        yield batch


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of tensors as whole words, which every fabric can send."""
    rows = [padded(tensor.data.contiguous().view(-1).view(torch.uint8)) for tensor in tensors if tensor.numel()]
    return torch.cat(rows).view(torch.int64) if rows else torch.zeros(0, dtype=torch.int64)


def padded(row: Tensor) -> Tensor:
    """Bytes up to a whole number of words."""
    return torch.cat([row, row.new_zeros(-row.numel() % WORD_BYTES)])


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write what was packed into tensors of the same kinds. Autograd is not told: the values belong there."""
    row = packed.view(torch.uint8)
    start = 0
    for tensor in tensors:
        if tensor.numel():
            piece = row[start : start + tensor.nbytes].clone()  # aligned as its dtype needs it
            tensor.data.copy_(piece.view(tensor.dtype).view(tensor.shape))
            start += tensor.nbytes + -tensor.nbytes % WORD_BYTES


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[int, str, Tensor]]:
    """The tensors of optimizer states, in the order of their parameters: its position, the name in the state, it."""
    return optimizer_values(optimizers, Tensor)


def optimizer_values(optimizers: Iterable[torch.optim.Optimizer], kind: type) -> Iterator[tuple[int, str, Any]]:
    """What is of some kind in optimizer states, in the order of parameters: a position, the name in the state, it."""
    position = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                for name in sorted(key for key, value in state.items() if isinstance(value, kind)):
                    yield position, name, state[name]
                position += 1


def is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether every rank keeps another part of the optimizer's state, as ZeRO does, so that nothing can be compared."""
    if any(kind.__name__ in SHARDING for kind in type(optimizer).__mro__):
        return True
    values = (value for state in optimizer.state.values() for value in state.values())
    return any(type(value).__name__ in SHARDS for value in values)


def model_tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def broadcast_optimizers(fabric: Fabric, optimizers: Sequence[torch.optim.Optimizer], root: int) -> None:
    """Give the whole state of one rank's optimizers to all, also to those that have none yet."""
    states = broadcast_object(fabric, [optimizer.state_dict()["state"] for optimizer in optimizers], root)
    if fabric.rank != root:
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def compare_rates(fabric: Fabric, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Warn on every rank of learning rates that differ: a scheduler is the user's, and would set them again."""
    rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    if not all_have(fabric, repr(rates)):
        log.warning(
            "learning rates differ between ranks after join(), here they are %s, so replicas will make different "
            "steps; let a scheduler make equally many steps on all ranks, such as one after each join()",
            rates,
        )


def broadcast_scaler(fabric: Fabric, scaler: torch.amp.GradScaler, root: int) -> None:
    """Give one rank's scale to all: means of gradients with different scales are none."""
    state = broadcast_object(fabric, scaler.state_dict(), root)
    if fabric.rank != root:
        scaler.load_state_dict(state)


def average_optimizers(fabric: Fabric, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Take the means of what optimizers keep, if all keep the same things; a rank that skipped steps may not."""
    kept = [(at, name, tensor) for at, name, tensor in optimizer_tensors(optimizers) if tensor.is_floating_point()]
    finite = all(bool(torch.isfinite(tensor).all()) for _, _, tensor in kept)
    text = repr([finite, *((at, name, tensor.dtype, tensor.shape) for at, name, tensor in kept)])
    if not all_have(fabric, text):
        log.warning("the states of optimizers were not averaged, because ranks keep different things")
        return
    for batch in batches(tensor for _, _, tensor in kept):
        flat = torch.cat([tensor.detach().flatten().to(torch.float64) for tensor in batch]).to(fabric.device)
        fabric.all_reduce(flat, op="mean")
        start = 0
        for tensor in batch:
            tensor.copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()


def broadcast_object(fabric: Fabric, mine: Any, root: int) -> Any:
    """What one rank has. What cannot be sent is refused on all ranks."""
    words = message_or_refusal(mine) if fabric.rank == root else torch.zeros(0, dtype=torch.int64)
    length = torch.tensor([len(words)], device=fabric.device)
    fabric.broadcast(length, root)
    words = words.to(fabric.device) if fabric.rank == root else length.new_zeros(int(length))
    fabric.broadcast(words, root)
    refusal, told = read_message(words.cpu())
    if refusal:
        raise ConfigError(f"on rank {root}: {refusal}")
    return mine if fabric.rank == root else told


def message_or_refusal(value: Any) -> Tensor:
    """A value as words, or why it cannot be sent."""
    try:
        return write_message(("", value))
    except ConfigError as error:
        return write_message((str(error), None))
