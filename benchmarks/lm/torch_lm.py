"""Steps of a model of the size of OneBillionWordTiny by torch, in eager mode.

To be run with the Python of an environment that has torch; needs no TensorFlow.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch
from shared.contender import ROOT, serve_timed
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(ROOT))

from models.one_billion_word.sizes import Tiny


class Block(nn.Module):
    """Causal attention to the whole row, then a feed-forward layer, as `named.TransformerBlock`."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        dim, hidden = Tiny.MODEL_DIM, Tiny.HIDDEN_DIM
        self.first_norm, self.second_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.project, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.wide, self.narrow = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        projected = self.project(self.first_norm(x))
        q, k, v = projected.view(batch, length, 3, Tiny.NUM_HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = attended.transpose(1, 2).reshape(batch, length, dim)
        x = x + self.dropout(self.out(attended))
        hidden = self.dropout(functional.relu(self.wide(self.second_norm(x))))
        return x + self.dropout(self.narrow(hidden))


class Model(nn.Module):
    """The embedding, the blocks and the softmax."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        dim = Tiny.MODEL_DIM
        self.embedding = nn.Embedding(Tiny.VOCAB_SIZE, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(Tiny.NUM_LAYERS))
        self.norm, self.softmax = nn.LayerNorm(dim), nn.Linear(dim, Tiny.VOCAB_SIZE)
        places = torch.arange(Tiny.SEQUENCE_LENGTH)[:, None]
        turns = places * 1e-4 ** (torch.arange(dim // 2) / (dim // 2 - 1))
        self.register_buffer("places", torch.cat([turns.sin(), turns.cos()], -1))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(ids) * math.sqrt(Tiny.MODEL_DIM) + self.places)
        for block in self.blocks:
            x = block(x)
        logits = self.softmax(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_step(dropout: float):
    """A step of training on one batch, both cores at each operation."""
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    model = Model(dropout)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    shape = [Tiny.BATCH_SIZE, Tiny.SEQUENCE_LENGTH]
    ids, labels = (torch.randint(Tiny.VOCAB_SIZE, shape) for _ in range(2))

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(ids, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), Tiny.CLIP_GRADIENT_NORM)
        optimizer.step()
        return float(loss.detach())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dropout", type=float, required=True)
    step = make_step(parser.parse_args().dropout)
    serve_timed(lambda: (step(),))


if __name__ == "__main__":
    main()
