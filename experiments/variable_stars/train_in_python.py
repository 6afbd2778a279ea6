"""The model of `both`, trained in Python with the meaningful loss: cross entropy and errors of expected values.

python experiments/variable_stars/train_in_python.py [--epochs 8] [--out data/variable_stars] [--max-per-class 3000]
"""

import argparse

from components import load_variable_stars

from etude import CausalTransformerLM, Trainer, set_seed
from etude.multimodal import read_modalities

WEIGHTS = {
    "magnitude": 0.02,
    "colour": 0.03,
    "period": 0.06,
    "amplitude": 0.25,
    "image": 6,
    "spectrum": 6,
    "class": 2,
}
"""A tenth over the variance of each modality's values: see configs/both.yaml."""


def train(epochs: int, out: str, **options: object) -> dict[str, float]:
    """Train on the stars in `out`, which are made if they are not there; return the numbers of the validation."""
    set_seed(0)
    data = load_variable_stars(out, **options)
    model = CausalTransformerLM(
        data.vocab_size, n_types=data.num_types, d_model=128, n_layers=3, n_heads=4, dropout=0.1, max_len=20
    )
    trainer = Trainer(
        model=model,
        vocab=read_modalities(out),  # the tokens of every modality, and the values that they stand for
        train_loader=data.make_loader("train", 64),
        val_loader=data.make_loader("validation", 256, shuffle=False),
        config={"learning_rate": 2e-3, "weight_decay": 0.1, "meaningful_loss": {"weights": WEIGHTS}},
    )
    trainer.train(num_epochs=epochs)
    return trainer.evaluate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", default="data/variable_stars", help="folder of the data")
    parser.add_argument("--max-per-class", type=int, default=3000, help="stars of a class that are taken at most")
    arguments = parser.parse_args()
    for name, value in train(arguments.epochs, arguments.out, max_per_class=arguments.max_per_class).items():
        print(f"{name:24} {value:.4f}")
