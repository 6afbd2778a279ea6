"""Small files and folders of data, written into the current folder."""

import json
import random
from pathlib import Path

import numpy as np
import pytest


def write_csv(classes=True):
    source = random.Random(0)
    lines = ["a,b,color,y"]
    for _ in range(200):
        a, b = source.gauss(3, 2), source.gauss(0, 1)
        y = ("yes" if a + b > 3 else "no") if classes else f"{a + b:.4f}"
        lines.append(f"{a:.4f},{b:.5f},{source.choice(['red', 'green'])},{y}")
    Path("d.csv").write_text("\n".join(lines))


def touch_csv():
    path = Path("d.csv")
    path.write_text(path.read_text().replace("red", "green", 1))


def write_arrays(offset=0.0):
    source = np.random.default_rng(0)
    y = source.integers(0, 3, 200)
    np.savez("d.npz", x=source.normal(y[:, None], 1.0, (200, 4)) + offset, y=y)


def write_images():
    image = pytest.importorskip("PIL.Image")
    source = np.random.default_rng(0)
    for name, light in (("dark", 60), ("light", 200)):
        Path("pictures", name).mkdir(parents=True)
        for place in range(40):
            pixels = np.clip(source.normal(light, 40, (16, 16, 3)), 0, 255).astype(np.uint8)
            image.fromarray(pixels).save(f"pictures/{name}/{place}.png")


def swap_images():
    Path("pictures/dark/0.png").write_bytes(Path("pictures/light/0.png").read_bytes())


def write_lines(extra="!"):
    source = random.Random(0)
    words = {"good": ["fine", "great", "lovely"], "bad": ["poor", "awful", "dull"]}
    lines = [
        {"text": " ".join(source.choices(words[label], k=source.randint(1, 6))) + extra, "label": label}
        for label in source.choices(["good", "bad"], k=150)
    ]
    Path("d.jsonl").write_text("\n".join(map(json.dumps, lines)))


def write_dataset(extra=0.0):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    source = random.Random(0)
    values = [source.gauss(0, 1) for _ in range(150)]
    columns = {"a": [value + extra for value in values], "label": ["yes" if value > 0 else "no" for value in values]}
    datasets.Dataset.from_dict(columns).save_to_disk("saved")
