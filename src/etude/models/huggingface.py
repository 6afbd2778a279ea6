"""Hugging Face causal language models and text classifiers, by architecture name or from a folder."""

from typing import Annotated, Any

from annotated_types import Ge
from torch import nn

from etude.config.registry import register
from etude.core.errors import ConfigError
from etude.core.spelling import did_you_mean


@register("model", "huggingface")
@register("model", "huggingface_causal_lm")
def huggingface_causal_lm(
    architecture: str | None = None,
    pretrained: str | None = None,
    vocab_size: Annotated[int, Ge(1)] | None = None,
    settings: dict[str, Any] | None = None,
) -> nn.Module:
    """A causal language model of Hugging Face's transformers.

    architecture: a model type such as `gpt2` or `llama`, with new weights.
    pretrained: instead, a folder (or a name in the local cache) whose config and weights are loaded.
    vocab_size: taken from the data by default.
    settings: keys of the model's own config, such as {n_layer: 4, n_embd: 128} for gpt2.
    """
    return _made("CausalLM", "causal language model", architecture, pretrained, vocab_size, settings or {})


@register("model", "huggingface_classifier")
def huggingface_classifier(
    num_classes: Annotated[int, Ge(2)],
    architecture: str | None = None,
    pretrained: str | None = None,
    vocab_size: Annotated[int, Ge(1)] | None = None,
    settings: dict[str, Any] | None = None,
) -> nn.Module:
    """A classifier of texts of Hugging Face's transformers.

    num_classes, vocab_size: taken from the data by default.
    architecture: a model type such as `bert` or `distilbert`, with new weights; padding has the id 0.
    pretrained: instead, a folder (or a name in the local cache) whose config and weights are loaded; a head for
        another number of classes has new weights.
    settings: keys of the model's own config, such as {num_hidden_layers: 4} for bert.
    """
    given = {"num_labels": num_classes, **(settings or {})}
    if given["num_labels"] != num_classes:
        raise ConfigError(f"settings.num_labels is {given['num_labels']}, but there are {num_classes} classes")
    if pretrained is None:
        given.setdefault("pad_token_id", 0)
    return _made("SequenceClassification", "text classifier", architecture, pretrained, vocab_size, given)


def _made(
    head: str,
    words: str,
    architecture: str | None,
    pretrained: str | None,
    vocab_size: int | None,
    settings: dict[str, Any],
) -> nn.Module:
    """Return a model of transformers with a head, such as `CausalLM`."""
    transformers = _transformers()
    if (architecture is None) == (pretrained is None):
        raise ConfigError("set either `architecture` (new weights) or `pretrained` (a folder with weights)")
    auto = getattr(transformers, f"AutoModelFor{head}")
    chosen = {"use_cache": False, **settings}
    if pretrained is not None:
        return _loaded(auto, pretrained, vocab_size, chosen)
    if vocab_size is not None:
        chosen.setdefault("vocab_size", vocab_size)
    model_types = auto._model_mapping._model_mapping
    if architecture not in model_types:
        hint = did_you_mean(str(architecture), model_types) or f", such as {'gpt2' if head == 'CausalLM' else 'bert'}"
        raise ConfigError(f"architecture '{architecture}' is not a {words} of transformers{hint}")
    config = transformers.AutoConfig.for_model(architecture)
    _check_settings(config, str(architecture), chosen)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(config, name, None)
        if isinstance(token, int) and vocab_size is not None and token >= vocab_size:
            chosen.setdefault(name, None)  # special token ids of the original vocabulary
    model: nn.Module = auto.from_config(transformers.AutoConfig.for_model(architecture, **chosen))
    return model


def _loaded(auto: Any, place: str, vocab_size: int | None, settings: dict[str, Any]) -> nn.Module:
    more = {"ignore_mismatched_sizes": True} if "num_labels" in settings else {}
    try:
        model: nn.Module = auto.from_pretrained(
            place, use_safetensors=True, trust_remote_code=False, local_files_only=True, **settings, **more
        )
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"pretrained '{place}' cannot be loaded (safetensors on this machine): {text}") from error
    size = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    if vocab_size is not None and vocab_size > size:
        raise ConfigError(
            f"the data has {vocab_size} tokens, '{place}' only {size}: tokenize the data with the model's own tokenizer"
        )
    return model


def _check_settings(config: Any, architecture: str, settings: dict[str, Any]) -> None:
    """Refuse a key that the architecture's config does not have: transformers would store and ignore it."""
    known = {*config.to_dict(), *config.attribute_map, "num_labels"}
    for key in settings:
        if key not in known:
            raise ConfigError(f"settings.{key}: {architecture} has no such setting{did_you_mean(key, known)}")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("models of Hugging Face need transformers: pip install 'etude[huggingface]'") from error
    return transformers
