"""Sample a few texts from a language model, at the end of a run and if wanted during it."""

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn

from etude.callbacks.monitored import resolve
from etude.checkpoint import check_kind, record_of
from etude.config.registry import register
from etude.core import ConfigError
from etude.core.arguments import checked
from etude.core.files import write_text
from etude.core.model import ModelCall, unwrap
from etude.corpus import load_tokenizer, read_vocabulary
from etude.engine.callback import Callback, Logs, RunInfo, RunParts
from etude.losses.strategies import logits_of
from etude.models import CausalTransformerLM
from etude.models.sampling import Temperature, TopK, TopP, evaluating, next_tokens
from etude.monitor.run_folder import SAMPLES

logger = logging.getLogger("etude")

_STATE = record_of("TextSamples", {"count": Annotated[int, Ge(0)]})


@register("callback", "text_samples")
class TextSamples(Callback):
    """Lets the model continue each of `prompts`, and writes the texts to samples.txt in the run folder at the end.

    With `every`, texts are also published by step after every so many validations, or epochs if there is no
    validation: media.jsonl, the dashboard and other tools show them.

    An empty prompt starts a new document. A text ends with its document or after `max_new_tokens`. Any causal model
    over tokens works. It has its own random generator, so it does not change the run; if sampling fails, there is
    only a warning.
    """

    needs_model = True

    @checked
    def __init__(
        self,
        prompts: list[str] | None = None,
        max_new_tokens: Annotated[int, Ge(1)] = 200,
        temperature: Temperature = 0.8,
        top_k: TopK = None,
        top_p: TopP = 0.95,
        seed: Annotated[int, Ge(0)] = 0,
        tokenizer: str | None = None,
        every: Annotated[int, Ge(1)] | None = None,
    ) -> None:
        """`tokenizer` is a tokenizer.json or a folder with one; in a config file it is that of the data."""
        super().__init__()
        self.prompts = [""] if prompts is None else list(prompts)
        self.max_new_tokens, self.seed = max_new_tokens, seed
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.tokenizer, self.every = tokenizer, every
        self._run: RunInfo | None = None
        self._validates = False
        self._count = 0
        """Validations so far, or epochs."""
        self._published_at = -1

    @classmethod
    def writes(cls, arguments: Mapping[str, Any]) -> Sequence[str]:  # noqa: ARG003
        """Return samples.txt."""
        return (SAMPLES,)

    def bind(self, parts: RunParts) -> None:
        """Find out whether validations or epochs are counted."""
        self._validates = parts.val_loader is not None

    def on_train_begin(self, run: RunInfo) -> None:
        """Check early that there is a tokenizer, not after hours of training."""
        if self.tokenizer is None:
            raise ConfigError("text_samples needs a tokenizer, and the data has none; set tokenizer to its file")
        self._run, self._published_at = run, -1
        if run.clock.step == 0:
            self._count = 0
        if run.is_main or run.divides_model:
            load_tokenizer(self.tokenizer)

    def on_validation_end(self, epoch: int, metrics: Logs) -> None:
        """Sample, if it is time."""
        self._count_one()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Sample, if it is time and there is no validation."""
        if not self._validates:
            self._count_one()

    def on_train_end(self, result: Logs) -> None:
        """Sample, and write the file."""
        if self.control.interrupted or (text := self._sample()) is None:
            return
        if self.every is not None:
            self._publish(text)
        path = resolve(SAMPLES, self._run)
        try:
            write_text(path, text)
        except OSError as error:
            logger.warning("text_samples: cannot write %s: %s", path, error.strerror or error)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of validations or epochs so far."""
        return {"count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue to count."""
        check_kind(_STATE, state, "state")
        self._count = state["count"]

    def _count_one(self) -> None:
        self._count += 1
        if self.every is not None and self._count % self.every == 0 and (text := self._sample()) is not None:
            self._publish(text)

    def _publish(self, text: str) -> None:
        assert self._run is not None
        if self._published_at != self._run.clock.step:
            self._published_at = self._run.clock.step
            self.publish("samples", "text", text)

    def _sample(self) -> str | None:
        """Return all texts as one; None on other processes, or if sampling fails."""
        if self._run is None or not (self._run.is_main or self._run.divides_model):
            return None
        try:
            text = "\n\n".join(_framed(text) for text in self.sample(self._run.model)) + "\n"
            return text if self._run.is_main else None
        except Exception as error:  # sampling must not end the run, whatever the model raises
            logger.warning("text_samples: no text could be sampled: %s", " ".join(str(error).split()))
            return None

    def sample(self, model: nn.Module) -> list[str]:
        """Return a text for every prompt, the prompt included."""
        assert self.tokenizer is not None
        tokenizer, end = load_tokenizer(self.tokenizer), read_vocabulary(self.tokenizer).end
        model = unwrap(model)
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(self.seed)
        texts = []
        for prompt in self.prompts:
            ids = [end, *tokenizer.encode(prompt, add_special_tokens=False).ids]
            whole = self._continue(model, torch.tensor([ids], device=device), end, generator)[0].tolist()
            written = whole[1:-1] if whole[-1] == end else whole[1:]
            texts.append(str(tokenizer.decode(written, skip_special_tokens=False)))
        return texts

    def _continue(self, model: nn.Module, tokens: Tensor, end: int, generator: torch.Generator) -> Tensor:
        if isinstance(model, CausalTransformerLM):
            return model.generate(
                tokens, self.max_new_tokens, self.temperature, self.top_k, self.top_p, generator, stop_id=end
            )
        call = ModelCall(model)
        with evaluating(model):
            for _ in range(self.max_new_tokens):
                logits = logits_of(call(model, {"input_ids": tokens}))[:, -1]
                chosen = next_tokens(logits, self.temperature, self.top_k, self.top_p, generator)
                tokens = torch.cat([tokens, chosen[:, None]], 1)
                if int(chosen) == end:  # synchronises
                    break
        return tokens


def _framed(text: str) -> str:
    """Return a text with a bar before every line, to show where it ends, and without control characters."""
    shown = "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in text)
    return "\n".join(f"│ {line}" for line in shown.split("\n"))
