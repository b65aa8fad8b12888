"""Medusa heads (arXiv 2401.10774) on a frozen AR model: small layers that guess the tokens after the next.

What stands here is the method's first stage with a chain of guesses, in few lines. Two simplifications, both
to be known when its figures are compared: the heads share the model's own vocabulary projection (the paper
gives each a copy of its own to train), and one chain of best guesses is verified, not a tree of several.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mars_lm.baselines.drafting import DraftingDecoder
from mars_lm.baselines.forward import Request, RowsForward
from mars_lm.checkpoint import Checkpoint
from mars_lm.errors import MarsError

DECAY = 0.8  # head k weighs DECAY ** k in the loss, as in the paper


class MedusaHeads(nn.Module):
    """K residual layers over the last hidden state; head k guesses the token k places behind AR's next.

    Args:
        count: K.
        hidden: the model's width.
    """

    def __init__(self, count: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(count))
        for layer in self.layers:  # at first every head says what the model says
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, hidden: Tensor) -> Tensor:
        """[M, hidden] -> [K, M, hidden], each to go through the vocabulary projection."""
        return torch.stack([hidden + nn.functional.silu(layer(hidden)) for layer in self.layers])


class MedusaDecoder(DraftingDecoder):
    """Drafts with the heads, verifies with the model: AR's text.

    Args:
        checkpoint: the model that the heads were trained on.
        heads: the heads.
        max_rows: prompts decoded together.
    """

    def __init__(self, checkpoint: Checkpoint, heads: MedusaHeads, *, max_rows: int = 16) -> None:
        super().__init__(checkpoint, max_rows=max_rows)
        parameter = next(checkpoint.model.parameters())
        self.heads = heads.to(parameter.device, parameter.dtype).eval()

    def propose(
        self, request: Request, hidden: Tensor, candidates: list[int], agreed: int, forward: RowsForward
    ) -> list[int]:
        states = self.heads(hidden[agreed : agreed + 1])[:, 0]  # [K, hidden]
        states = states[: self.length(request, len(self.heads.layers))]
        if not len(states):
            return []
        return [int(t) for t in forward.logits(states, self.mask_token_id).argmax(dim=-1).tolist()]


def train_heads(
    checkpoint: Checkpoint,
    examples: Sequence[tuple[list[int], int]],
    *,
    heads: int = 3,
    steps: int = 500,
    batch_size: int = 16,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> MedusaHeads:
    """Train heads on the responses of examples; the model stays as it is.

    Args:
        checkpoint: the frozen model.
        examples: token ids, and the place of the first that is to be predicted.
        heads: K.
    Returns:
        The heads, in float32.
    """
    model, device = checkpoint.model, next(checkpoint.model.parameters()).device
    medusa = MedusaHeads(heads, model.config.hidden_size).to(device)
    optimizer = torch.optim.AdamW(medusa.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.Generator().manual_seed(seed)
    projection = model.get_output_embeddings()
    for _ in range(steps):
        picked = [examples[i] for i in torch.randint(len(examples), (batch_size,), generator=order)]
        width = max(len(ids) for ids, _ in picked)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in picked], device=device)
        with torch.no_grad():  # right padding: causal attention keeps real tokens from seeing it
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        guesses = medusa(hidden.float())  # [K, R, T, hidden]
        loss = torch.zeros((), device=device)
        count = 0
        for k in range(1, heads + 1):
            # The state at t knows tokens up to t; AR predicts t+1, head k predicts t+1+k, in the response.
            row, at = torch.tensor(
                [
                    (r, t)
                    for r, (tokens, start) in enumerate(picked)
                    for t in range(start - 1, len(tokens) - 1 - k)
                ]
                or [(0, 0)],
                device=device,
            ).T
            logits = projection(guesses[k - 1][row, at].to(projection.weight.dtype)).float()
            target = ids[row, (at + 1 + k).clamp(max=width - 1)]
            loss = loss + DECAY**k * nn.functional.cross_entropy(logits, target, reduction="sum")
            count += len(target)
        optimizer.zero_grad()
        (loss / max(count, 1)).backward()
        optimizer.step()
        schedule.step()
    return medusa.eval()


def save_heads(heads: MedusaHeads, folder: str | Path, *, fingerprint: str) -> None:
    """Write the heads, with the fingerprint of the model that they belong to."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: value.contiguous() for name, value in heads.state_dict().items()}, folder / "heads.safetensors"
    )
    about = {"heads": len(heads.layers), "model": fingerprint}
    (folder / "heads.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def load_heads(folder: str | Path, checkpoint: Checkpoint) -> MedusaHeads:
    """Read heads for a model.

    Raises:
        MarsError: no heads there, or those of a model of another width.
    """
    folder = Path(folder)
    try:
        about = json.loads((folder / "heads.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "heads.safetensors")
        heads = MedusaHeads(int(about["heads"]), checkpoint.model.config.hidden_size)
        heads.load_state_dict(weights)
    except (OSError, ValueError, KeyError) as error:
        raise MarsError(f"{folder} holds no Medusa heads that can be read ({error}).") from None
    except RuntimeError:
        raise MarsError(f"The Medusa heads in {folder} belong to a model of another width.") from None
    return heads
