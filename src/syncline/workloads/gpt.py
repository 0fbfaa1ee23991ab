"""A byte-level GPT: pre-norm transformer, learned positions, head tied to the embedding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from syncline.workloads.seeded import seeded

BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a GPT is."""

    width: int = 384
    layers: int = 6
    heads: int = 6
    context: int = 64  # bytes it sees


SHAPES = {
    "1M": Shape(width=128, heads=4),
    "5M": Shape(width=256, heads=4),
    "10M": Shape(),
    "20M": Shape(width=512, heads=8),
}


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1 = nn.LayerNorm(shape.width)
        self.to_heads = nn.Linear(shape.width, 3 * shape.width)
        self.from_heads = nn.Linear(shape.width, shape.width)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        x = x + self.attend(self.norm_1(x))
        hidden: Tensor = self.narrow(F.gelu(self.widen(self.norm_2(x))))
        return x + hidden

    def attend(self, x: Tensor) -> Tensor:
        """Every position looks at those before it."""
        batch, time, width = x.shape
        parts = self.to_heads(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.from_heads(seen.transpose(1, 2).reshape(batch, time, width))
        return attended


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, shape.width)
        self.place = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(start_small)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes (batch, time) to logits (batch, time, 256)."""
        hidden = self.embed(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.embed.weight)

    def loss(self, text: Tensor) -> Tensor:
        """Cross entropy of every next byte; `text` has one byte more than is looked at."""
        return next_byte_loss(self, text)


def next_byte_loss(model: nn.Module, text: Tensor) -> Tensor:
    """Cross entropy of every next byte, through the model's forward, which DDP needs to see."""
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def start_small(module: nn.Module) -> None:
    """Weights as GPT-2 has them at the start."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def make_gpt(shape: Shape, seed: int = 0) -> GPT:
    """The same weights for the same seed."""
    with seeded(seed):
        return GPT(shape)
