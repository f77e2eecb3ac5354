"""The default model in eager PyTorch, written as PyTorch users would."""

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        hidden = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(hidden)


class GPT(nn.Module):
    def __init__(self, vocab: int, length: int, layers: int, width: int, heads: int):
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocab, width),
            nn.Embedding(length, width),
        )
        self.blocks = nn.ModuleList(
            Block(width, heads, 4 * width) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def make_step(**sizes):
    """Returns a function of (inputs, targets) that runs one clipped AdamW update."""
    torch.manual_seed(0)
    model = GPT(**sizes)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )

    def step(inputs, targets) -> float:
        logits = model(torch.from_numpy(inputs))
        loss = functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(targets).flatten()
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step
