"""The root schema: both habits of writing configs load as they stand and mean the same."""

import itertools
import json

import pytest

from etude import create_model_config, create_trainer_config, load_experiment_config
from etude.core import ConfigError
from etude.experiment import experiment_schema, load_config

IMAGE_DIALECT = """\
model:
  name: lenet5
  num_classes: 10
  input_shape: [1, 28, 28]
  dropout: 0.0
  dtype: float32

training:
  epochs: 10
  batch_size: 64
  log_interval: 100
  validate_interval: 1
  save_checkpoints: true
  checkpoint_interval: 5

optimizer:
  name: sgd
  learning_rate: 0.01
  momentum: 0.9
  weight_decay: 0.0001
"""

TOKEN_DIALECT = """\
training:
  seed: 0
  batch_size: 16
  epochs: 5
  learning_rate: 0.0002
  weight_decay: 0.05
  warmup_steps: 2000
  grad_clip: 1.0
  grad_accum_steps: 1
  num_workers: 4
  pin_memory: true
  persistent_workers: true
  prefetch_factor: 2
  log_every: 50
  save_every_steps: 5000

  meaningful_loss:
    enabled: true
    sample_k_per_modality: 4096
    weight_image: 0.1
    weight_scalar: 0.1
    weight_spectrum: 0.1
"""


def load(tmp_path, text, *overrides, name="x.yaml"):
    path = tmp_path / name
    path.write_text(text)
    return load_config(path, overrides=overrides)


def test_image_dialect_loads_as_it_stands(tmp_path):
    config = load(tmp_path, IMAGE_DIALECT)
    assert create_model_config(config)["input_shape"] == (1, 28, 28)
    trainer = create_trainer_config(config)
    assert (trainer.num_epochs, trainer.batch_size, trainer.log_interval) == (10, 64, 100)
    assert (trainer.checkpoint_interval, trainer.save_checkpoints, trainer.validate_interval) == (5, True, 1)
    assert (trainer.learning_rate, trainer.weight_decay, trainer.use_scheduler) == (0.01, 0.0001, False)
    assert config.require("data").component.name == "mnist"  # what the model names as its own


def test_token_dialect_loads_as_it_stands(tmp_path):
    config = load(tmp_path, TOKEN_DIALECT)
    trainer = create_trainer_config(config)
    assert (trainer.log_interval, trainer.gradient_clip_norm, trainer.save_every_steps) == (50, 1.0, 5000)
    assert (trainer.learning_rate, trainer.weight_decay, trainer.warmup_steps) == (0.0002, 0.05, 2000)
    assert (trainer.use_scheduler, trainer.scheduler_type) == (True, "warmup_cosine")
    assert (trainer.num_workers, trainer.persistent_workers, trainer.prefetch_factor) == (4, True, 2)
    assert trainer.meaningful_loss["sample_k"] == 4096
    optimizer = config.require("optimizer")
    assert (optimizer.component.name, optimizer.arguments) == ("adamw", {"lr": 0.0002, "weight_decay": 0.05})
    with pytest.raises(ConfigError, match="there is no `model:` section"):
        create_model_config(config)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ("optimizer: {lr: 0.1, weight_decay: 0.2}", (0.1, 0.2, None)),
        ("optimizer: {name: adamw, lr: 0.1}", (0.1, 0.01, None)),
        ("optimizer: {name: sgd, lr: 0.1, weight_decay: 0.2}", (None, None, None)),
        ("scheduler: {name: warmup_cosine, warmup_steps: 7}", (None, None, 7)),
        ("scheduler: {name: inverse_sqrt, warmup_steps: 7}", (None, None, 7)),
        ("optimizer: {name: adam, lr: 0.1}\nscheduler: {name: warmup_cosine, warmup_steps: 7}", (None, None, 7)),
        ("training: {learning_rate: 0.1, warmup_steps: 7}", (0.1, 0.01, 7)),
    ],
)
def test_training_has_only_what_a_trainer_in_python_acts_on_as_the_file_says(tmp_path, sections, expected):
    """A `Trainer` makes AdamW and warmup_cosine of these numbers, so they must be for them."""
    config = load(tmp_path, f"model: {{name: lenet5}}\n{sections}\n")
    training = config.training
    assert (training.learning_rate, training.weight_decay, training.warmup_steps) == expected


def test_both_dialects_mean_the_same(tmp_path):
    (tmp_path / "one" / "configs").mkdir(parents=True)
    one = load(
        tmp_path,
        "model: lenet5\noptimizer: {name: adamw, lr: 3e-4}\nscheduler: {name: warmup_cosine, warmup_steps: 10}\n"
        "training: {epochs: 2, log_interval: 7, gradient_clip_norm: 0.5, grad_accum_steps: 2, precision: bf16}",
        name="one/configs/same.yaml",
    )
    (tmp_path / "two").mkdir()
    other = load(
        tmp_path,
        "name: one/same\nmodel: {name: lenet5}\ntraining: {num_epochs: 2, log_every: 7, grad_clip: 0.5, "
        "gradient_accumulation_steps: 2, learning_rate: 0.0003, warmup_steps: 10, precision: bf16}",
        name="two/same.yaml",
    )
    assert one.to_dict() == other.to_dict()


def test_mixed_precision_keys(tmp_path):
    text = "training: {use_mixed_precision: true, precision_dtype: float16, loss_scale: 1024.0}"
    training = load(tmp_path, text).training
    assert (training.resolved_precision, training.loss_scale) == ("fp16", 1024.0)
    assert load(tmp_path, "training: {use_mixed_precision: false}").training.resolved_precision == "fp32"
    assert load(tmp_path, "training: {use_mixed_precision: true}").training.resolved_precision == "bf16"


def test_use_scheduler_false_turns_it_off(tmp_path):
    text = "training: {use_scheduler: false, scheduler_type: cosine}"
    assert load(tmp_path, text).selection("scheduler") is None
    text = "training: {use_scheduler: true, scheduler_type: cosine}"
    assert load(tmp_path, text).require("scheduler").component.name == "cosine"


def test_use_scheduler_must_be_true_or_false(tmp_path):
    with pytest.raises(ConfigError, match=r"training\.use_scheduler: .*maybe"):
        load(tmp_path, "training: {use_scheduler: maybe}")


def test_use_scheduler_false_beside_a_scheduler_of_the_same_file_contradicts(tmp_path):
    with pytest.raises(ConfigError, match=r"training\.use_scheduler.*contradicts.*scheduler"):
        load(tmp_path, "scheduler: {name: cosine}\ntraining: {use_scheduler: false}")
    overrides = ("scheduler.name=cosine", "training.use_scheduler=false")
    with pytest.raises(ConfigError, match=r"training\.use_scheduler.*contradicts.*scheduler"):
        load(tmp_path, "model: lenet5", *overrides)


def test_of_use_scheduler_false_and_a_scheduler_the_later_one_counts(tmp_path):
    text = "scheduler: cosine"
    assert load(tmp_path, text, "training.use_scheduler=false").selection("scheduler") is None
    text = "training: {use_scheduler: false}"
    assert load(tmp_path, text, "scheduler.name=cosine").require("scheduler").component.name == "cosine"


def test_the_same_setting_in_two_places_of_one_file_contradicts(tmp_path):
    with pytest.raises(ConfigError, match=r"training\.learning_rate.*contradicts optimizer\.lr.*keep one"):
        load(tmp_path, "optimizer: {name: sgd, lr: 0.1}\ntraining: {learning_rate: 0.2}")


def test_command_line_beats_the_other_dialect_of_the_file(tmp_path):
    text = "optimizer: {name: sgd, lr: 0.1}"
    assert load(tmp_path, text, "training.learning_rate=0.2").require("optimizer").arguments["lr"] == 0.2
    text = "training: {learning_rate: 0.1}"
    assert load(tmp_path, text, "optimizer.lr=0.3").require("optimizer").arguments["lr"] == 0.3


def test_messages_show_what_was_written(tmp_path):
    with pytest.raises(ConfigError, match=r"x\.yaml:1: training\.learning_rate: .*greater than 0"):
        load(tmp_path, "training: {learning_rate: -1}")
    with pytest.raises(ConfigError, match=r"x\.yaml:2: training\.log_every"):
        load(tmp_path, "training:\n  log_every: 0")


@pytest.mark.parametrize("text", [IMAGE_DIALECT, TOKEN_DIALECT])
def test_resolved_config_reads_back_to_the_same(tmp_path, text):
    config = load(tmp_path, text)
    again = load(tmp_path, config.to_yaml(), name="again.yaml")
    assert again.to_dict() == config.to_dict()
    as_json = load(tmp_path, json.dumps(config.to_dict()), name="again.json")
    assert as_json.to_dict() == config.to_dict()


def test_shipped_configs_are_fine():
    for name in ("baseline", "lecun1998"):
        config = load_experiment_config("lenet5", name)
        assert config.name == f"lenet5/{name}"


def test_schema_accepts_what_loads_and_rejects_what_does_not():
    import jsonschema
    import yaml

    schema = experiment_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(yaml.safe_load(IMAGE_DIALECT))
    validator.validate(yaml.safe_load(TOKEN_DIALECT))
    for text in (
        "training: {batch_sise: 3}",
        "optimizer: {name: sgd, momentun: 0.9}",
        "optimizer: {name: nonesuch}",
        "training: {epochs: many}",
        "modle: lenet5",
    ):
        assert not validator.is_valid(yaml.safe_load(text)), text


SWITCHES = ["auto", "on", "off", "step", "model", "true", True, False, None, 1, []]


def test_schema_and_reader_accept_the_same_switches(tmp_path):
    import jsonschema

    validator = jsonschema.Draft202012Validator(experiment_schema())
    for key, value in itertools.product(("compile", "compile_model", "capture"), SWITCHES):
        content = {"training": {key: value}}
        try:
            load(tmp_path, json.dumps(content), name="x.json")
        except ConfigError:
            is_read = False
        else:
            is_read = True
        assert validator.is_valid(content) == is_read, content
    properties = experiment_schema()["$defs"]["file"]["properties"]["training"]["properties"]
    words = [{*one.get("enum", ())} for one in properties["compile"]["anyOf"]]
    assert {"auto", "off", "model", "step"} in words  # what an editor completes


def test_user_components_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nfrom etude import register\n\n"
        "@register('model', 'experiment_test_net')\nclass Net(nn.Module):\n"
        "    def __init__(self, width: int = 3):\n        super().__init__()\n        self.width = width\n"
    )
    config = load(tmp_path, "imports: [mine.py]\nmodel: {name: experiment_test_net, width: 5}")
    assert create_model_config(config) == {"width": 5}
    written = config.to_dict()
    assert written["imports"] == [str((tmp_path / "mine.py").resolve())]  # a run folder lies elsewhere
    with pytest.raises(ConfigError, match="did you mean 'width'"):
        load(tmp_path, "imports: [mine.py]\nmodel: {name: experiment_test_net, widht: 5}")


def test_companion_section_is_completed_by_overrides(tmp_path):
    config = load(tmp_path, IMAGE_DIALECT, "data.limit=100")
    assert config.require("data").component.name == "mnist"
    assert config.require("data").arguments["limit"] == 100
