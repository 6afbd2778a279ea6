"""Hugging Face causal language models, by architecture name or from a folder."""

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
    transformers = _transformers()
    if (architecture is None) == (pretrained is None):
        raise ConfigError("set either `architecture` (new weights) or `pretrained` (a folder with weights)")
    chosen = {"use_cache": False, **(settings or {})}
    if pretrained is not None:
        return _loaded(transformers, pretrained, vocab_size, chosen)
    if vocab_size is not None:
        chosen.setdefault("vocab_size", vocab_size)
    model_types = transformers.AutoModelForCausalLM._model_mapping._model_mapping
    if architecture not in model_types:
        hint = did_you_mean(str(architecture), model_types) or ", such as gpt2 or llama"
        raise ConfigError(f"architecture '{architecture}' is not a causal language model of transformers{hint}")
    config = transformers.AutoConfig.for_model(architecture)
    _check_settings(config, str(architecture), chosen)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(config, name, None)
        if isinstance(token, int) and vocab_size is not None and token >= vocab_size:
            chosen.setdefault(name, None)  # special token ids of the original vocabulary
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(architecture, **chosen)
    )
    return model


def _loaded(transformers: Any, place: str, vocab_size: int | None, settings: dict[str, Any]) -> nn.Module:
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            place, use_safetensors=True, trust_remote_code=False, local_files_only=True, **settings
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
    known = {*config.to_dict(), *config.attribute_map}
    for key in settings:
        if key not in known:
            raise ConfigError(f"settings.{key}: {architecture} has no such setting{did_you_mean(key, known)}")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("models of Hugging Face need transformers: pip install 'etude[huggingface]'") from error
    return transformers
