"""Small heads that read the vision tower's output directly while it trains. They are thrown away afterwards.

The language model alone teaches the tower slowly: one token of an answer has to say, through 30 frozen layers, which of
thousands of pixels mattered. The probes say it at every token of every picture: what is here, and what is in the whole.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from server.demo.targets import CELL_CLASSES, IGNORED, SLOTS

MOST_TOKENS = 256
"""Of a picture: 448 x 448 pixels."""


class Probes(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.cells = nn.Linear(width, sum(CELL_CLASSES))
        self.queries = nn.Linear(width, len(SLOTS), bias=False)
        self.values = nn.Linear(width, width)
        self.slots = nn.ModuleList(nn.Linear(width, len(classes)) for classes in SLOTS.values())

    def forward(self, tokens: Tensor, starts: Tensor, cells: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of the cells and of the slots. `starts` (pictures + 1): the first token of each; `cells`, `slots`: the targets."""
        h = self.norm(tokens.float())
        losses = [F.cross_entropy(part, cells[:, i], ignore_index=IGNORED) for i, part in enumerate(self.cells(h).split(list(CELL_CLASSES), -1))]
        return torch.stack(losses).sum(), self._slots_loss(h, starts, slots)

    def answers(self, tokens: Tensor, starts: Tensor) -> list[Tensor]:
        """Scores (pictures, classes) of each slot."""
        return self._scores(self.norm(tokens.float()), starts)

    def _scores(self, h: Tensor, starts: Tensor) -> list[Tensor]:
        first, count = starts[:-1], starts[1:] - starts[:-1]
        offset = torch.arange(MOST_TOKENS, device=h.device)
        inside = offset[None] < count[:, None]
        grid = h[(first[:, None] + offset).clamp(max=len(h) - 1)]
        weight = self.queries(grid).masked_fill(~inside[..., None], -1e9).softmax(1)
        pooled = torch.einsum("ptq,ptw->pqw", weight, self.values(grid))
        return [head(pooled[:, i]) for i, head in enumerate(self.slots)]

    def _slots_loss(self, h: Tensor, starts: Tensor, slots: Tensor) -> Tensor:
        total = h.new_zeros(())
        for i, scores in enumerate(self._scores(h, starts)):
            asked = slots[:, i] != IGNORED
            loss = F.cross_entropy(scores, slots[:, i].clamp(min=0), reduction="none")
            total = total + (loss * asked).sum() / asked.sum().clamp(min=1)
        return total
