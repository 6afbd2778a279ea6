"""The model of `baseline`, trained with the loop classes: the loop over epochs is yours, an epoch is theirs.

python experiments/tiny_lm/train_with_loops.py [--epochs 5] [--blocks 2048] [--inputs FOLDER …]
"""

import argparse

from etude import (
    CausalTransformerLM,
    DataLoader,
    EpochResult,
    GradientAccumulator,
    GradientMonitor,
    LanguageModelingLoss,
    TrainingLoop,
    ValidationLoop,
    set_seed,
)
from etude.data import TokenMixture, load_text_corpus
from etude.optim import AdamW, warmup_cosine

BATCH, ACCUMULATION, LENGTH = 8, 4, 128


def train(epochs: int, blocks: int, inputs: list[str], vocab_size: int = 2048, out: str | None = None) -> float:
    """Train on `blocks` blocks of text in every epoch; return the best validation loss."""
    set_seed(0)
    data = load_text_corpus(inputs, out, vocab_size=vocab_size, length=LENGTH)
    # A mixture of one source has epochs as short as one likes; over all of them every block comes equally often.
    source = TokenMixture({"text": data.train.data}, weights={"text": 1.0}, size=blocks)
    train_loader = DataLoader(source, batch_size=BATCH)
    val_loader = DataLoader(data.validation.data, batch_size=BATCH, shuffle=False)

    model = CausalTransformerLM(data.vocab_size, d_model=192, n_layers=2, n_heads=6, dropout=0.0, max_len=LENGTH)
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    total_steps = epochs * -(-len(train_loader) // ACCUMULATION)
    scheduler = warmup_cosine(total_steps, warmup_steps=total_steps // 20)

    loss_strategy = LanguageModelingLoss()
    train_loop = TrainingLoop(
        clip_gradients=True,
        loss_strategy=loss_strategy,
        gradient_accumulator=GradientAccumulator(optimizer, accumulation_steps=ACCUMULATION),
        gradient_monitor=GradientMonitor(),
    )
    val_loop = ValidationLoop(loss_strategy=loss_strategy)

    best = float("inf")
    for epoch in range(epochs):
        train_result = train_loop.train_epoch(model, train_loader, optimizer, scheduler, epoch)
        val_result = val_loop.validate_epoch(model, val_loader, epoch)
        best = min(best, val_result.loss)
        print(f"Epoch {epoch + 1}/{epochs}")
        print(f"Training:       {line(train_result)} | LR: {train_result.lr:.2e}")
        print(f"Validation:     {line(val_result)}")
        print(f"Perplexity:     train={train_result.perplexity:.2f} | val={val_result.perplexity:.2f}")
        print(f"Grad norms:     min={train_result.grad_norm_min:.4f} | max={train_result.grad_norm_max:.4f}\n")
    print(f"Best validation loss: {best:.4f}")
    return best


def line(result: EpochResult) -> str:
    """Return the numbers that training and validation share."""
    return (
        f"Loss: {result.loss:.4f} | Acc: {result.accuracy:.4f} | Duration: {result.duration_s:.1f}s | "
        f"Throughput: {result.tokens_per_s:,.0f} tokens/s"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=2048, help="blocks of text per epoch")
    parser.add_argument("--inputs", nargs="+", default=["stdlib"], help="files, folders or patterns")
    arguments = parser.parse_args()
    train(arguments.epochs, arguments.blocks, arguments.inputs)
