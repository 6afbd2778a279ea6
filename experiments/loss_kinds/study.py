"""Train one small model for each kind of loss, alone and beside cross entropy, and tell what its answers are good for.

    python experiments/loss_kinds/study.py [--seeds 3] [--steps 150] [--picture kinds.svg]

Prints one Markdown table for the descent from random logits and one for each problem. Two minutes on one core.
"""

import argparse
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from noisy_bins import BINS, CENTRES, PROBLEMS, VOCAB, WIDTH, Problem
from picture import draw
from torch import Tensor

from etude import CausalTransformerLM, DataLoader, Trainer, set_seed
from etude.multimodal.loss import MeaningfulLoss, combined_loss
from etude.optim import AdamW

KINDS = ("mse", "huber", "hl_gauss", "wasserstein")
NEAR = 2
"""How many bins away from the truth still count as near it."""
WEIGHT = 1.0
"""Of a kind beside cross entropy; values have a standard deviation of about one."""
BATCH = 256
TEST = 4096
"""Values to judge by."""


@dataclass(frozen=True)
class Case:
    """A loss to train with: cross entropy, a kind, or both."""

    kind: str | None
    use_ce: bool = True

    @property
    def name(self) -> str:
        return " + ".join([*(["ce"] if self.use_ce else []), *([self.kind] if self.kind else [])])

    def loss(self, values: Tensor) -> MeaningfulLoss:
        return MeaningfulLoss(
            VOCAB,
            {"scalar": values.float()},
            weight=WEIGHT,
            kind=self.kind or "mse",
            use_ce=self.use_ce,
            enabled=self.kind is not None,
        )


CASES = (Case(None), *(Case(kind, False) for kind in KINDS), *(Case(kind) for kind in KINDS))


def descend(kind: str | None, target: int, starts: int, steps: int) -> Tensor:
    """Return the distributions (starts, bins) that descent on one loss alone ends at, from random logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.zeros(starts, 1, VOCAB.vocab_size)
    logits[..., VOCAB.range_of("scalar").slice] = 2 * torch.randn(starts, 1, BINS, generator=generator)
    logits.requires_grad_()
    targets = VOCAB.encode("scalar", torch.full((starts, 1), target))
    loss_config = {"enabled": kind is not None, "kind": kind or "mse", "weight_scalar": 1.0}
    optimizer = torch.optim.Adam([logits], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss, _ = combined_loss(
            logits, targets, VOCAB, scalar_centers=CENTRES.float(), config=loss_config, use_ce=kind is None
        )
        loss.backward()
        optimizer.step()
    return scalar_probabilities(logits.detach())[:, 0]


def train(case: Case, problem: Problem, seed: int, steps: int) -> CausalTransformerLM:
    """Train a small model on a problem."""
    set_seed(seed)
    model = CausalTransformerLM(
        VOCAB.vocab_size, d_model=32, n_layers=1, n_heads=2, dropout=0.0, max_len=16, tie_embeddings=False
    )
    places, steps = problem.length - 1, max(1, round(steps * problem.share))
    data = {"tokens": problem.draw(problem.count // places, seed=1000 + seed)}
    trainer = Trainer(
        model,
        DataLoader(data, batch_size=BATCH // places, seed=seed),
        loss=case.loss(problem.values),
        optimizer=AdamW(model.parameters(), lr=7e-3, weight_decay=0.0),
        config={
            "max_steps": steps,
            "warmup_steps": steps // 20,
            "seed": seed,
            "device": "cpu",
            "precision": "fp32",
            "train_metrics": False,
        },
        progress=False,
    )
    trainer.train()
    return model.eval()


def scalar_probabilities(logits: Tensor) -> Tensor:
    """Return the probabilities of the bins (…, bins): a position is known to hold a value."""
    return logits[..., VOCAB.range_of("scalar").slice].double().softmax(dim=-1)


@torch.no_grad()
def answers(model: CausalTransformerLM, tokens: Tensor) -> Tensor:
    """Return the model's probabilities of the bins at every position that has a next token."""
    return scalar_probabilities(model(tokens[:, :-1]))


def measure(probabilities: Tensor, bins: Tensor, values: Tensor) -> dict[str, float]:
    """Return what distributions (n, bins) are worth if these bins (n) are what came; distances are in bins."""
    places = torch.arange(BINS, dtype=torch.float64)
    truth = bins.double()
    median = (probabilities.cumsum(dim=-1) < 0.5).sum(dim=-1).clamp_max(BINS - 1)
    near = (places - truth[:, None]).abs() <= NEAR
    own = probabilities.gather(1, bins[:, None])[:, 0]
    return {
        "mean": math.sqrt((probabilities @ values - values[bins]).square().mean()) / WIDTH,
        "median": float((median - truth).abs().mean()),
        "mode": float((probabilities.argmax(dim=-1) - truth).abs().mean()),
        "near": float((probabilities * near).sum(dim=-1).mean()),
        "nll": float(-own.clamp_min(1e-12).log().mean()),
    }


COLUMNS = {
    "mean": ("RMSE of the mean", ".2f"),
    "median": ("MAE of the median", ".2f"),
    "mode": ("MAE of the mode", ".2f"),
    "near": (f"mass within ±{NEAR} bins", ".3f"),
    "nll": ("NLL of the true bin", ".2f"),
}


def table(rows: Mapping[str, Iterable[Mapping[str, float]]]) -> str:
    """Return a Markdown table: a row for each name, mean ± standard deviation over its measurements."""
    lines = [["loss", *(title for title, _ in COLUMNS.values())], ["---"] * (1 + len(COLUMNS))]
    for name, measured in rows.items():
        cells = [f"`{name}`"]
        for column, (_, form) in COLUMNS.items():
            values = torch.tensor([one[column] for one in measured], dtype=torch.float64)
            spread = f" ± {values.std():{form}}" if len(values) > 1 else ""
            cells.append(f"{values.mean():{form}}{spread}")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def study_descent(target: int, starts: int, steps: int) -> tuple[str, dict[str, Tensor]]:
    """Return the table of the descent from random logits, and where the first start ends by loss."""
    rows, first = {}, {}
    for kind in (None, *KINDS):
        ended = descend(kind, target, starts, steps)
        first[kind or "ce"] = ended[0]
        rows[kind or "ce"] = [measure(one[None], torch.tensor([target]), CENTRES) for one in ended]
    return table(rows), first


def study_problem(problem: Problem, seeds: int, steps: int, show: Tensor) -> tuple[str, dict[str, Tensor]]:
    """Return the table of a problem, and by loss the first model's answer after the token `show`."""
    tokens = problem.draw(TEST // (problem.length - 1), seed=0)
    bins = VOCAB.decode("scalar", tokens[:, 1:]).flatten()
    rows = {"truth": [measure(problem.truth(tokens[:, :-1]).flatten(0, 1), bins, problem.values)]}
    first = {"truth": problem.truth(show)}
    for case, seed in product(CASES, range(seeds)):
        model = train(case, problem, seed, steps)
        rows.setdefault(case.name, []).append(measure(answers(model, tokens).flatten(0, 1), bins, problem.values))
        if seed == 0:
            first[case.name] = answers(model, torch.stack([show, show])[None])[0, 0]
    return table(rows), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="models for each loss and problem")
    parser.add_argument("--steps", type=int, default=150, help="of training, each")
    parser.add_argument("--picture", type=Path, help="write the distributions to this file, as SVG")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    words, panels = study_descent(target=28, starts=20, steps=3 * arguments.steps)
    print(f"## One value, from 20 random starts\n\n{words}\n")
    shown = {"one value": panels}
    for problem in PROBLEMS:
        token = VOCAB.range_of("place").base + 24 if problem.length == 2 else VOCAB.range_of("scalar").base + 10
        words, shown[problem.name] = study_problem(problem, arguments.seeds, arguments.steps, torch.tensor(token))
        print(f"## {problem.name}: {problem.what}\n\n{words}\n", flush=True)
    if arguments.picture:
        arguments.picture.write_text(draw(shown, KINDS), encoding="utf-8")


if __name__ == "__main__":
    main()
