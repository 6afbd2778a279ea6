"""One model for several tasks: a shared trunk, one head per task, and extracting features from a trunk."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from etude.core.batch import Batch, JointBatch, is_next_token
from etude.core.buffers import probing
from etude.core.errors import ConfigError, TrainingError
from etude.core.model import ModelCall, linked
from etude.core.spelling import did_you_mean, listed, suggest
from etude.losses.fused_head import NamesItsHead
from etude.models.features import Features, Trunk, feature_dim
from etude.models.huggingface_trunk import HuggingFaceModel, HuggingFaceTrunk
from etude.multitask.heads import LanguageModelHead


class MultiTaskModel(nn.Module):
    """Runs a trunk once on a batch, and only the requested heads on its features.

    The trunk is any model (see `features`), a head a module that is called with `Features`. The weighting of the
    tasks becomes part of the model in `MultiTask.join` (called by a `Trainer`), so that it is saved, moved, optimized
    and kept in sync like the rest. The model does not call it.

    >>> import torch
    >>> from etude.models import LeNet5
    >>> from etude.multitask.heads import LinearHead
    >>> heads = {"angle": LinearHead(1, in_features=84), "size": LinearHead(2, in_features=84)}
    >>> model = MultiTaskModel(LeNet5(), heads)
    >>> {name: tuple(output.shape) for name, output in model(torch.zeros(3, 1, 28, 28), ["size"]).items()}
    {'size': (3, 2)}
    """

    def __init__(self, trunk: nn.Module, heads: Mapping[str, nn.Module]) -> None:
        """Assemble the model; a language model head without an output layer creates its own now."""
        super().__init__()
        for name in heads:
            if not name or "." in name or name in dir(nn.ModuleDict):
                raise ConfigError(
                    f"a head cannot be named '{name}', which is not a valid module name; choose another"
                )
        self.trunk = trunk
        self.heads = nn.ModuleDict(heads)
        self.weighting: nn.Module | None = None
        self._has_features = isinstance(trunk, Trunk)
        is_huggingface = isinstance(trunk, HuggingFaceModel) and not self._has_features
        self._huggingface = HuggingFaceTrunk(trunk) if is_huggingface else None
        self._call = ModelCall(trunk.features if isinstance(trunk, Trunk) else trunk)
        for head in heads.values():
            if isinstance(head, LanguageModelHead):
                head.attach(self.get_output_embeddings(), feature_dim(trunk))

    def forward(self, batch: Batch, heads: Sequence[Any]) -> Any:
        """Return the outputs of the named heads, by name; raise TrainingError for an unknown head.

        For a `JointBatch`, with a list of heads for each of its batches, it returns a list of outputs: all batches
        are run in one call, because DistributedDataParallel expects one forward call per backward pass.
        """
        if isinstance(batch, JointBatch):
            return [self._answers(part, names) for part, names in zip(batch, heads, strict=True)]
        return self._answers(batch, heads)

    def _answers(self, batch: Batch, heads: Sequence[str]) -> dict[str, Any]:
        for name in heads:
            if name not in self.heads:
                raise TrainingError(f"the model has no head '{name}'{suggest(name, self.heads)}")
        features = self.features(batch)
        return {name: self.heads[name](features) for name in heads}

    def features(self, batch: Batch) -> Features:
        """Return the trunk's features of a batch; raise TrainingError if it returns something else.

        A `Trunk` runs its `features`, a Hugging Face model its base model; for any other model the output is the
        features.
        """
        trunk: Any = self.trunk
        if self._huggingface is not None:
            hidden = self._huggingface(trunk, batch)
        else:
            hidden = self._call(trunk.features if self._has_features else trunk, batch)
        if not isinstance(hidden, Tensor) or hidden.dim() not in (2, 3):
            found = (
                f"a tensor of shape {tuple(hidden.shape)}" if isinstance(hidden, Tensor) else type(hidden).__name__
            )
            raise TrainingError(
                f"heads need features (batch, length, width) or (batch, width), but {type(trunk).__name__} returned "
                f"{found}; add a method `features` and an attribute `feature_dim`"
            )
        if self.weighting is not None:
            # Only the loss uses the weighting's parameters; DistributedDataParallel must find them in the graph.
            hidden = linked(hidden, *self.weighting.parameters())
        mask, document_ids = positions_of(batch) if hidden.dim() == 3 else (None, None)
        softcap = None if self._huggingface is None else self._huggingface.softcap
        return Features(hidden, mask, document_ids, self.get_output_embeddings(), softcap)

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the trunk's own linear output layer, if it has one and only applies it to the features."""
        if not isinstance(self.trunk, NamesItsHead) or (self._huggingface and not self._huggingface.has_output):
            return None
        layer = self.trunk.get_output_embeddings()
        return layer if isinstance(layer, nn.Linear) else None

    def num_parameters(self) -> int:
        """Return the number of parameters; shared weights count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the trainable parameters as parameter groups; those of the weighting have no weight decay."""
        weighting = [] if self.weighting is None else list(self.weighting.parameters())
        own = {id(parameter) for parameter in weighting}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.parameters() if p.requires_grad and id(p) not in own]},
            {"params": [p for p in weighting if p.requires_grad], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def shared_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters of the trunk, without an output layer that only one head uses."""
        output = self.get_output_embeddings()
        users = sum(isinstance(head, LanguageModelHead) and head.layer is None for head in self.heads.values())
        uses = Counter(id(parameter) for _, parameter in self.trunk.named_parameters(remove_duplicate=False))
        layer = [] if output is None or users > 1 else list(output.parameters())
        own = {id(parameter) for parameter in layer if uses[id(parameter)] == 1}  # unless it is tied to the embedding
        return [p for p in self.trunk.parameters() if p.requires_grad and id(p) not in own]

    def last_shared_layer(self, batch: Batch) -> str:
        """Return the name of the trunk's last block, before the heads. The trunk is run once to find it.

        It is the block whose trainable matrix is used last in computing the features, whatever the order of
        definition: an element of a module list or sequence, otherwise a layer. The trunk's own output layer does not
        count, because it comes after the features.
        """
        with probing(self.trunk, training=False), torch.enable_grad():
            used = order_of_use(self.features(batch).hidden)
        last, name = -1, ""
        for candidate, module in self.trunk.named_modules():
            matrices = [p for p in self._trained(module, recurse=False) if p.dim() >= 2]
            when = max((used.get(id(matrix), -1) for matrix in matrices), default=-1)
            if when > last:
                last, name = when, candidate
        return ".".join(("trunk", *self._block_of(name)))

    def layer_parameters(self, layer: str) -> list[nn.Parameter]:
        """Return the trainable parameters of a layer of the trunk; raise ConfigError if there is none of that name.

        The name is relative to the model (`trunk.fc`) or to the trunk (`fc`).
        """
        known = {".".join(filter(None, ("trunk", name))): module for name, module in self.trunk.named_modules()}
        module = known.get(layer, known.get(f"trunk.{layer}"))
        found = [] if module is None else self._trained(module)
        if not found:
            last = [name for name in known if self._trained(known[name], recurse=False)][-8:]
            hint = did_you_mean(layer, [*known, *(name.removeprefix("trunk.") for name in known)])
            raise ConfigError(
                f"the trunk has no layer '{layer}' that is trained{hint} (the last are: {listed(last)})"
            )
        return found

    def _trained(self, module: nn.Module, recurse: bool = True) -> list[nn.Parameter]:
        """Return the trainable parameters of a module, without those of the trunk's own output layer."""
        output = self.get_output_embeddings()
        own = set() if output is None else {id(parameter) for parameter in output.parameters()}
        return [p for p in module.parameters(recurse) if p.requires_grad and id(p) not in own]

    def _block_of(self, name: str) -> list[str]:
        """Return the path of the block that contains a module of the trunk: up to the outermost list or sequence."""
        parts, module = name.split(".") if name else [], self.trunk
        for place, part in enumerate(parts, start=1):
            if isinstance(module, (nn.ModuleList, nn.Sequential)):
                return parts[:place]
            module = module.get_submodule(part)
        return parts


def positions_of(batch: Batch) -> tuple[Tensor | None, Tensor | None]:
    """Return mask and document ids of the model's positions, (B, L) each, or None.

    >>> import torch
    >>> positions_of({"input_ids": torch.tensor([[5, 6, 0]]), "document_ids": torch.tensor([[0, 1, -1]])})[0]
    tensor([[ True,  True, False]])
    """
    if not isinstance(batch, Mapping):
        return None, None
    mask = next((batch[key] for key in ("attention_mask", "attn_mask") if key in batch), None)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        mask = None  # masks of other shapes do not describe padding
    documents = batch.get("document_ids")
    if not isinstance(documents, Tensor):
        documents = None
    elif mask is None:
        mask = documents >= 0
    if is_next_token(batch):  # the model does not receive the last token, which has no next one
        mask = None if mask is None else mask[:, :-1]
        documents = None if documents is None else documents[:, :-1]
    return mask, documents


def order_of_use(result: Tensor) -> dict[int, int]:
    """Return when each parameter was last used in computing a tensor, by id; larger numbers are later.

    >>> first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    >>> used = order_of_use(first(second(torch.ones(1, 2))))
    >>> used[id(first.weight)] > used[id(second.weight)]
    True
    """
    used: dict[int, int] = {}
    seen, waiting = set(), [result.grad_fn] if result.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        for child, _ in node.next_functions:
            if (
                isinstance(leaf := getattr(child, "variable", None), Tensor) and leaf.is_leaf
            ):  # an accumulation node of a parameter
                used[id(leaf)] = max(used.get(id(leaf), -1), node._sequence_nr())
            elif child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
    return used
