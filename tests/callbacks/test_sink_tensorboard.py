"""TensorBoardLogger, read back with TensorBoard's own reader."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

import etude
from etude.callbacks import Callback, TensorBoardLogger
from etude.core import ConfigError
from etude.monitor import RunFolder
from forked_python import run_python
from sink_stand_ins import curves, read_tensorboard

pytest.importorskip("tensorboard")

DATA = (torch.randn(64, 4), torch.randint(0, 3, (64,)))


def every_point(*arguments, **more):
    return TensorBoardLogger(*arguments, points_per_s=None, **more)


def make(*callbacks, **kwargs):
    config = {"epochs": 2, "batch_size": 8, "log_interval": 2, "device": "cpu", **kwargs.pop("config", {})}
    torch.manual_seed(0)
    return etude.Trainer(
        nn.Linear(4, 3), DATA, DATA, config=config, callbacks=list(callbacks), progress=False, **kwargs
    )


def recorded(run, split):
    return [one for one in RunFolder(run).read_metrics() if one["split"] == split]


def test_curves_are_those_of_the_run_folder(tmp_path):
    make(every_point(), output_dir=tmp_path / "run", metrics=["f1"]).train()
    found = curves(tmp_path / "run" / "tensorboard")
    for split, tag in (("train", "train/loss"), ("epoch", "epoch/loss"), ("train", "train/lr")):
        expected = [(one["step"], one[tag.partition("/")[2]]) for one in recorded(tmp_path / "run", split)]
        assert len(expected) in (2, 8)
        assert np.array(found[tag]) == pytest.approx(np.array(expected), rel=1e-6)
    for name in ("loss", "f1"):
        expected = [(one["step"], one[f"val_{name}"]) for one in recorded(tmp_path / "run", "val")]
        assert np.array(found[f"val/{name}"]) == pytest.approx(np.array(expected), rel=1e-6)
    assert {tag.partition("/")[0] for tag in found} == {"train", "val", "epoch", "speed", "progress"}
    assert not [tag for tag in found if "val_" in tag or tag.endswith("/step")]


def test_config_texts_and_matrices(tmp_path):
    class Says(Callback):
        def on_epoch_end(self, epoch, logs):
            self.publish("samples", "text", "once <b>upon</b>\n# a time")
            self.notify("look at this")

    make(every_point(), Says(), output_dir=tmp_path / "run", metrics=["confusion_matrix"]).train()
    read = read_tensorboard(tmp_path / "run" / "tensorboard")

    def texts(tag):
        return [(one.step, one.tensor_proto.string_val[0].decode()) for one in read.Tensors(f"{tag}/text_summary")]

    assert "batch_size: 8" in texts("config")[0][1]
    assert texts("samples") == [(step, "    once <b>upon</b>\n    # a time\n") for step in (8, 16)]
    assert texts("events/warning") == [(8, "look at this"), (16, "look at this")]
    assert texts("events/end") == [(16, "finished")]
    images = read.Images("confusion_matrix")
    assert [one.step for one in images] == [8, 16]
    picture = pixels(images[-1].encoded_image_string)
    media = [json.loads(line) for line in (tmp_path / "run" / "media.jsonl").read_text().splitlines()]
    matrix = np.array(
        next(one for one in media if one["name"] == "confusion_matrix" and one["step"] == 16)["data"]["matrix"]
    )
    shares = matrix / np.maximum(1, matrix.sum(1, keepdims=True))
    cell = picture.shape[0] // 3
    darkness = 255 - picture[cell // 2 :: cell, cell // 2 :: cell, 0][:3, :3].astype(float)
    assert darkness == pytest.approx(shares * (255 - 8), abs=1)


def pixels(png):
    import io

    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)))


def test_histograms_are_those_of_numpy(tmp_path):
    weights, gradients = [], []

    class Looks(Callback):
        def on_gradients(self, found):
            if self.step % 3 == 0:
                weights.append(found.model.weight.detach().numpy().copy())
                gradients.append((found.model.weight.grad / found.divisor).numpy().copy())
            self.step += 1

    looks = Looks()
    looks.step = 0
    make(every_point(histograms_every=3), looks, output_dir=tmp_path / "run").train()
    read = read_tensorboard(tmp_path / "run" / "tensorboard")
    assert set(read.Tags()["histograms"]) == {
        f"{kind}/{name}" for kind in ("weights", "gradients") for name in ("weight", "bias")
    }
    for tag, expected in (("weights/weight", weights), ("gradients/weight", gradients)):
        found = read.Histograms(tag)
        assert [one.step for one in found] == [1, 4, 7, 10, 13, 16]
        for one, values in zip(found, expected, strict=True):
            shown = one.histogram_value
            assert (shown.min, shown.max) == pytest.approx((values.min(), values.max()))
            assert (shown.num, shown.sum) == pytest.approx((12, values.sum()), rel=1e-5, abs=1e-6)
            assert shown.sum_squares == pytest.approx((values**2).sum(), rel=1e-5)
            edges = np.array([shown.min, *shown.bucket_limit])
            within = np.concatenate([[0], np.cumsum(shown.bucket)])
            below = np.array([(values < edge - 1e-6).sum() for edge in edges])
            upto = np.array([(values <= edge + 1e-6).sum() for edge in edges])
            assert ((below <= within) & (within <= upto)).all()


def test_values_that_are_not_finite_do_not_spoil_a_histogram():
    from etude.callbacks.sinks.histograms import _row

    low, high, total, squares, *counts = _row(torch.tensor([1.0, float("nan"), 3.0, float("-inf")]), 2.0).tolist()
    assert (low, high, total, squares, sum(counts)) == (0.5, 1.5, 2.0, 2.5, 2)
    assert sum(_row(torch.full((3,), float("nan")), 1.0).tolist()[4:]) == 0
    assert sum(_row(torch.zeros(0), 1.0).tolist()[4:]) == 0
    assert _row(torch.ones(5), 1.0).tolist()[:5] == [1, 1, 5, 5, 5]


def test_histograms_do_not_change_training(tmp_path):
    plain, watched = make(), make(every_point(str(tmp_path), histograms_every=1))
    results = []
    for trainer in (plain, watched):
        trainer.train()
        results.append(trainer.model.weight.detach().clone())
    assert torch.equal(*results)


def test_a_resumed_run_continues_its_curves(tmp_path):
    make(every_point(histograms_every=4), output_dir=tmp_path / "straight", config={"save_every_steps": 6}).train()

    class Dies(Callback):
        def on_step_end(self, report):
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 11:
                raise LookupError

    with pytest.raises(LookupError):
        make(
            every_point(histograms_every=4), Dies(), output_dir=tmp_path / "run", config={"save_every_steps": 6}
        ).train()
    beyond = [step for step, _ in curves(tmp_path / "run" / "tensorboard")["train/loss"]]
    assert beyond == [2, 4, 6, 8, 10]  # the checkpoint is that of step 8
    make(
        every_point(histograms_every=4),
        output_dir=tmp_path / "run",
        resume=True,
        config={"save_every_steps": 6},
    ).train()
    found, expected = (curves(tmp_path / name / "tensorboard") for name in ("run", "straight"))
    for tag in expected:
        if not tag.startswith("speed/") and not tag.endswith(("_s", "data_wait")):
            assert found[tag] == expected[tag], tag
    steps = [
        [one.step for one in read_tensorboard(tmp_path / name / "tensorboard").Histograms("weights/weight")]
        for name in ("run", "straight")
    ]
    assert steps[0] == steps[1] == [1, 5, 9, 13]


def test_a_run_that_begins_again_replaces_its_curves(tmp_path):
    """One that was killed before its first checkpoint."""
    make(every_point(str(tmp_path / "tb"))).train()
    make(every_point(str(tmp_path / "tb")), config={"epochs": 1}).train()
    assert [step for step, _ in curves(tmp_path / "tb")["train/loss"]] == [2, 4, 6, 8]


def test_a_killed_process_loses_at_most_the_last_log_point(tmp_path):
    """kill -9 in the middle of a step; log points are 0.2 s apart."""
    code = textwrap.dedent(
        """
        import os, signal, sys, time, torch
        import etude
        from etude.callbacks import Callback, TensorBoardLogger

        class Dies(Callback):
            def on_step_end(self, report):
                time.sleep(0.1)
                self.steps = getattr(self, "steps", 0) + 1
                if self.steps == 9:
                    os.kill(os.getpid(), signal.SIGKILL)

        data = (torch.randn(256, 4), torch.randint(0, 3, (256,)))
        config = {"epochs": 1, "batch_size": 8, "log_interval": 2, "device": "cpu"}
        callbacks = [TensorBoardLogger(points_per_s=None), Dies()]
        etude.Trainer(torch.nn.Linear(4, 3), data, config=config, callbacks=callbacks, output_dir=sys.argv[1]).train()
        """
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    steps = [step for step, _ in curves(tmp_path / "run" / "tensorboard")["train/loss"]]
    assert steps in ([2, 4, 6], [2, 4, 6, 8])
    assert [one["step"] for one in recorded(tmp_path / "run", "train")] == [2, 4, 6, 8]


def test_from_a_config_file(etude, tiny_mnist, tmp_path):
    text = textwrap.dedent(
        """
        model: {name: mlp, hidden: [4]}
        data: {name: mnist}
        training: {epochs: 1, max_steps: 4, log_interval: 2, device: cpu}
        callbacks: [{name: tensorboard, log_dir: tb}]
        """
    )
    (tmp_path / "x.yaml").write_text(text)
    done = etude("train", "x.yaml", "--run-dir", "run")
    assert done.code == 0, done.err
    assert [step for step, _ in curves(tmp_path / "run" / "tb")["train/loss"]] == [2, 4]
    (tmp_path / "x.yaml").write_text(text.replace("log_dir", "logdir"))
    assert "log_dir" in etude("train", "x.yaml", "--run-dir", "other").error
    (tmp_path / "x.yaml").write_text(text.replace("log_dir: tb", "histograms_every: 0"))
    assert "histograms_every" in etude("train", "x.yaml", "--run-dir", "other").error


def test_two_in_one_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="TensorBoardLogger"):
        make(TensorBoardLogger(), TensorBoardLogger(), output_dir=tmp_path / "run").train()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(etude.EtudeError, match="log_dir"):
        make(every_point(str(tmp_path / "file" / "tb"))).train()


def test_importing_the_sinks_imports_no_package():
    sinks = "etude.callbacks.sinks"
    code = f"import sys, {sinks}.tensorboard, {sinks}.wandb; print('tensorboard' in sys.modules)"
    assert run_python("-c", code, env=dict(os.environ)).stdout.strip() == "False"


def test_fast_log_points_are_thinned_and_the_last_before_a_validation_is_kept(tmp_path):
    make(TensorBoardLogger(points_per_s=0.001), output_dir=tmp_path / "run").train()
    steps = [step for step, _ in curves(tmp_path / "run" / "tensorboard")["train/loss"]]
    every = [one["step"] for one in recorded(tmp_path / "run", "train")]
    validated = [one["step"] for one in recorded(tmp_path / "run", "val")]
    assert steps == [every[0], *validated]
    assert len(steps) < len(every)
