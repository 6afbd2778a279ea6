"""Parameter groups by name: own settings for parameters that match a pattern, layer-wise rates, no decay of vectors."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Gt, Le
from torch import nn

from etude.core.errors import ConfigError
from etude.core.spelling import did_you_mean, listed, names_matching

logger = logging.getLogger("etude")

Groups = Sequence[Mapping[str, Any]]
"""Each has `params`, a pattern of names or several, and the settings of the parameters that match."""
LayerDecay = Annotated[float, Gt(0), Le(1)]
_NUMBERED = re.compile(r"(.*?\.)?\d+\.")


class NamedParams(list[Any]):
    """The parameters of a model, or groups of them, with their names: optimizers of etude look for patterns in these.

    Any other optimizer sees a list.
    """

    def __init__(
        self,
        items: Iterable[Any],
        names: Mapping[int, str],
        outer: frozenset[int] = frozenset(),
        elsewhere: frozenset[str] = frozenset(),
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(items)
        self.names = dict(names)
        """Names by the id of a parameter."""
        self.outer = outer
        """Ids of the parameters of embeddings and of the output layer."""
        self.elsewhere = elsewhere
        """Names of parameters that another optimizer has."""
        self.frozen = frozen
        """Names of parameters that no optimizer has, because they are not trained."""

    def with_items(self, items: Iterable[Any], elsewhere: frozenset[str] | None = None) -> "NamedParams":
        """Return other parameters or groups of the same model."""
        elsewhere = self.elsewhere if elsewhere is None else elsewhere
        return NamedParams(items, self.names, self.outer, elsewhere, self.frozen)


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the name of every parameter by its id; the first of several names."""
    return {id(param): name for name, param in model.named_parameters()}


def outer_params(model: nn.Module) -> frozenset[int]:
    """Return the ids of the parameters of embeddings and of the output layer.

    The output layer is what `get_output_embeddings()` returns, else the last linear layer, unless it is one of many: a
    model whose blocks end with a linear layer may use its embedding as output layer.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False))
    >>> outer_params(model) == {id(model[0].weight), id(model[2].weight)}
    True
    """
    modules: list[nn.Module] = [one for one in model.modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
    ask = getattr(model, "get_output_embeddings", None)
    output = ask() if callable(ask) else None
    found = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    linear = {name: (one.in_features, one.out_features) for name, one in found}
    if isinstance(output, nn.Module):
        modules.append(output)
    elif linear and not _is_repeated(last := list(linear)[-1], linear):
        modules.append(model.get_submodule(last))
    return frozenset(id(param) for one in modules for param in one.parameters(recurse=False))


def _is_repeated(name: str, shapes: Mapping[str, Any]) -> bool:
    """Whether a layer is inside a numbered module, and another number has the same layer."""
    found = re.fullmatch(r"((?:.*?\.)?)\d+(\..+)", name)
    if found is None:
        return False
    same = re.compile(rf"{re.escape(found[1])}\d+{re.escape(found[2])}")
    return any(same.fullmatch(one) and one != name and shapes[one] == shapes[name] for one in shapes)


def group_parameters(
    params: Any,
    groups: Groups = (),
    *,
    layer_decay: float | None = None,
    decay_only_matrices: bool = False,
    lr: float,
    settings: Iterable[str] | None = None,
    aliases: Mapping[str, str] | None = None,
    check: Callable[[Mapping[str, Any], str], None] | None = None,
) -> list[dict[str, Any]]:
    """Return the parameters as groups for any torch optimizer; those that match no pattern come first.

    `params` is a model, its `named_parameters()`, or `NamedParams`. A parameter belongs to the first group with a
    pattern that matches its name, or the name of a module it is in. With `layer_decay` the rate of the last layer is
    that of its group, and the rate of every layer before it is multiplied by this factor once more. With
    `decay_only_matrices` biases, norms and other vectors have no weight decay. `settings` are the keys that a group
    may have, all by default, `aliases` other names of them, and `check` may refuse their values. Raises ConfigError
    for a pattern that matches nothing.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    >>> groups = group_parameters(model, [{"params": "0.*", "lr": 1e-4}], lr=1e-3)
    >>> [(group.get("name"), group.get("lr"), len(group["params"])) for group in groups]
    [(None, None, 2), ('0', 0.0001, 2)]
    """
    given = named_params(params)
    bases = list(given) if any(isinstance(one, dict) for one in given) else [{"params": list(given)}]
    names = given.names
    if isinstance(groups, (str, Mapping)):
        raise ConfigError(f"optimizer.groups is {groups!r:.60}, which is no list of groups")
    own = [_checked(group, place, settings, aliases or {}) for place, group in enumerate(groups)]
    if check is not None:
        for place, group in enumerate(own):
            check(group, f"optimizer.groups.{place}")
    chosen = _places(given, own)
    layers = {} if layer_decay is None else _layers(names.values())
    last = max(layers.values(), default=0)
    made: dict[tuple[int, int, int, bool], dict[str, Any]] = {}
    for start, base in enumerate(bases):
        for param in base["params"]:
            name = names.get(id(param), "")
            place, layer = chosen.get(name, -1), layers.get(name, last)
            has_decay = not decay_only_matrices or param.dim() >= 2
            key = place, start, layer, has_decay
            if key not in made:
                made[key] = {**base, **({} if place < 0 else own[place]), "params": []}
                if layer_decay is not None:
                    rate = made[key].get("lr", lr) * layer_decay ** (last - layer)
                    label = "/".join(filter(None, (made[key].get("name"), f"layer_{layer}")))
                    made[key].update({"lr": rate} if layer == last else {"lr": rate, "name": label})
                if not has_decay:
                    made[key]["weight_decay"] = 0.0
            made[key]["params"].append(param)
    params_here = {names.get(id(param), ""): param for base in bases for param in base["params"]}
    _check_decay(own, chosen if decay_only_matrices else {}, params_here)
    return [made[key] for key in sorted(made, key=lambda key: (key[0], key[1], -key[2], not key[3]))]


def check_settings(factory: Callable[..., Any], group: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a setting of a group that is not of the type, or in the range, of its argument.

    Objects that no file can hold, such as a tensor, are left to the optimizer.
    """
    from pydantic_core import PydanticUndefined  # imported late: most optimizers have no groups

    from etude.config.schema import validate_section
    from etude.config.signature import parameters_of, schema_of

    required = [name for name, (_, default) in parameters_of(factory)[0].items() if default is PydanticUndefined]
    plain = bool, int, float, str, list, tuple, dict, type(None)
    given = {key: value for key, value in group.items() if key not in ("params", "name") and isinstance(value, plain)}
    validate_section(schema_of(factory, provided=required), given, path=where)


def named_params(params: Any) -> NamedParams:
    """Return the parameters of a model, or of its `named_parameters()`; raise ConfigError for others without names."""
    if isinstance(params, NamedParams):
        return params
    if isinstance(params, nn.Module):
        trained = [param for param in params.parameters() if param.requires_grad]
        frozen = frozenset(name for name, param in params.named_parameters() if not param.requires_grad)
        return NamedParams(trained, names_of(params), outer_params(params), frozen=frozen)
    pairs = list(params)
    if not all(isinstance(one, tuple) and len(one) == 2 for one in pairs):
        raise ConfigError("groups of parameters need their names: pass model.named_parameters(), or the model")
    return NamedParams([param for _, param in pairs], {id(param): name for name, param in pairs})


def _checked(group: Any, place: int, settings: Iterable[str] | None, aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return a group with its patterns as a list, a name and canonical keys."""
    where = f"optimizer.groups.{place}"
    if not isinstance(group, Mapping) or not group.get("params"):
        raise ConfigError(f"{where} needs `params`, a pattern of parameter names such as 'backbone.*'")
    found = {aliases.get(key, key): value for key, value in group.items()}
    if len(found) < len(group):
        twice = next(key for key in group if aliases.get(key, key) != key)
        raise ConfigError(f"{where} has {twice} and {aliases[twice]}, which are the same; keep one of them")
    allowed = None if settings is None else {*settings, "params", "name"}
    for key in found:
        if allowed is not None and key not in allowed:
            raise ConfigError(f"{where}.{key} is not a setting of this optimizer{did_you_mean(key, allowed)}")
    given = found["params"]
    patterns = list(given) if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(one, str) for one in patterns):
        raise ConfigError(f"{where}.params is {given!r:.60}; patterns of names are strings, such as '0.*'")
    label = ", ".join(re.sub(r"[.*?]+$", "", one) or one for one in patterns)
    return {"name": label, **found, "params": patterns}


def _places(given: NamedParams, groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the place of the first group that matches a name.

    Raises ConfigError for a group that has no effect, or has the name of another, whose rate would not be seen; logs a
    warning if that is because all its parameters are frozen.
    """
    chosen: dict[str, int] = {}
    for place, group in enumerate(groups):
        where = f"optimizer.groups.{place}.params"
        found = names_matching(group["params"], given.names.values(), where)
        matching = f"{where}: all parameters that match ({listed(found, shorten=True)}) are"
        if given.frozen.issuperset(found):
            logger.warning("%s frozen, so the group has no effect", matching)
        elif (given.frozen | given.elsewhere).issuperset(found):
            raise ConfigError(f"{matching} in another optimizer; move the group there")
        if chosen.keys() >= set(found):
            raise ConfigError(f"{matching} in earlier groups; list this group before them, or remove it")
        for name in found:
            chosen.setdefault(name, place)
        if any(group["name"] == other["name"] for other in groups[:place]):
            raise ConfigError(f"optimizer.groups.{place}: two groups are named '{group['name']}'; set another `name`")
    return chosen


def _check_decay(groups: Sequence[Mapping[str, Any]], chosen: Mapping[str, int], params: Mapping[str, Any]) -> None:
    """Raise ConfigError for a group of vectors with a weight decay, which would have none."""
    for place, group in enumerate(groups):
        its = [params.get(name) for name, own in chosen.items() if own == place]  # None: of another optimizer
        if its and group.get("weight_decay") and all(param is not None and param.dim() < 2 for param in its):
            raise ConfigError(
                f"optimizer.groups.{place}.weight_decay: all parameters of the group are biases, norms or other "
                "vectors, which have no weight decay with decay_only_matrices; remove one of the two"
            )


def _layers(names: Iterable[str]) -> dict[str, int]:
    """Return the layer of every parameter: numbered modules in the order of definition; 0 is what precedes them."""
    found: dict[str, int] = {}
    last, unit, is_open = 0, "", True
    for name in names:
        numbered = _NUMBERED.match(name)
        if numbered is not None and numbered.group() != unit:
            last, unit, is_open = last + 1, numbered.group(), True
        elif numbered is None and unit and is_open:  # what follows the numbered modules is one more layer
            last, is_open = last + 1, False
        found[name] = last
    if not unit:
        raise ConfigError("optimizer.layer_decay needs numbered layers, such as blocks.0; use optimizer.groups")
    return found


def group_names(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a name for every parameter group: its own, or its index; a name that is taken gets the index behind it.

    >>> group_names([{}, {"name": "head"}, {"name": "head"}])
    ['0', 'head', 'head.2']
    """
    own = {str(group["name"]) for group in groups if "name" in group}
    names: list[str] = []
    for place, group in enumerate(groups):
        name = str(group.get("name", place))
        is_taken = name in names or ("name" not in group and name in own)
        names.append(f"{name}.{place}" if is_taken else name)
    return names
