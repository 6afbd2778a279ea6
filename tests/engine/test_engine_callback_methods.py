"""Methods of callbacks: one that would never be called, or could not be, is refused when callbacks are listed."""

from functools import partialmethod

import pytest
import torch
from hypothesis import given, strategies as st

from etude import Callback
from etude.core import ConfigError
from etude.engine.callback import HOOKS
from etude.engine.callback_list import CallbackList

NO_ARGUMENTS = ("on_save_begin", "on_save_end")
TWO_ARGUMENTS = {"on_validation_end", "on_epoch_end", "on_phase_begin", "on_notice"}
"""The other hooks are called with one."""


def listed(*bases, **attributes):
    """List a callback of a new class."""
    kind = type("Mine", bases or (Callback,), attributes)
    return CallbackList([kind()])


def function(arguments):
    """Return a function of so many arguments."""
    return {
        0: lambda: None,
        1: lambda _1: None,
        2: lambda _1, _2: None,
        3: lambda _1, _2, _3: None,
        4: lambda _1, _2, _3, _4: None,
    }[arguments]


@given(hook=st.sampled_from(HOOKS), place=st.integers(3, 30), letter=st.sampled_from("aex_"))
def test_a_misspelt_hook_is_refused_and_the_right_one_named(hook, place, letter):
    name = hook[:place] + letter + hook[place:]
    with pytest.raises(ConfigError) as refused:
        listed(**{name: function(2)})
    assert f"Mine.{name} " in str(refused.value)
    assert f"'{hook}'" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("wrap", [lambda one: one, staticmethod, classmethod, torch.no_grad()])
def test_a_method_that_the_user_calls_is_to_be_renamed(wrap):
    with pytest.raises(ConfigError, match=r"Mine\.on_click .* rename"):
        listed(on_click=wrap(lambda *_: None))


def test_the_class_that_has_the_method_is_named():
    class Parent(Callback):
        def on_epoch_ends(self, epoch, logs):
            pass

    with pytest.raises(ConfigError, match="Parent"):
        listed(Parent)


class Library:
    """A class of somebody else, with hooks of its own."""

    def on_fit_start(self, trainer):
        pass


@pytest.mark.parametrize(
    ("bases", "attributes"),
    [
        ((Callback, Library), {}),
        ((Library, Callback), {}),
        ((), {"on_gpu": True, "on_device": torch.device, "on_done": None}),
        ((), {"on_rank": property(lambda self: 1 / 0)}),
        ((), {"_on_epoch": function(1), "once_done": function(1)}),
    ],
)
def test_what_is_no_misspelt_hook_is_left_alone(bases, attributes):
    assert len(listed(*bases, **attributes)) == 1


def test_functions_that_an_instance_stores_are_its_own():
    class Stores(Callback):
        def __init__(self, on_best):
            super().__init__()
            self.on_best = on_best

    assert len(CallbackList([Stores(print)])) == 1


def test_a_hook_that_a_class_of_the_library_adds_is_one():
    from etude.multitask import TaskGradientWatcher

    assert len(listed(TaskGradientWatcher, on_task_gradients=function(2))) == 1
    with pytest.raises(ConfigError, match=r"Mine\.on_task_gradients "):
        listed(on_task_gradients=function(2))


@pytest.mark.parametrize("given", range(5))
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_takes_the_arguments_it_is_called_with(hook, given):
    attributes = {hook: function(given)}
    if given == (
        4 if hook == "on_media" else 3 if hook in TWO_ARGUMENTS else 1 if hook in NO_ARGUMENTS else 2
    ):  # one is self
        assert listed(**attributes).hooks(hook)
    else:
        with pytest.raises(ConfigError, match=rf"Mine\.{hook} "):
            listed(**attributes)


@pytest.mark.parametrize(
    "method",
    [
        lambda self, *everything: None,
        lambda self, epoch, logs=None, more=3: None,
        lambda *everything, **named: None,
        staticmethod(lambda epoch, logs: None),
        classmethod(lambda cls, epoch, logs: None),
        partialmethod(lambda self, name, epoch, logs: None, "name"),
        torch.no_grad()(lambda self, epoch, logs: None),
    ],
)
def test_other_ways_to_write_a_hook(method):
    listed(on_epoch_end=method).on_epoch_end(0, 1)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("outcome", function(2)),
        ("numbers", function(2)),
        ("state_dict", function(0)),
        ("load_state_dict", function(1)),
        ("bind", function(1)),
        ("check_facts", function(2)),
        ("on_epoch_end", None),
        ("on_epoch_end", lambda self, epoch, *, logs: None),
    ],
)
def test_other_methods_that_a_run_calls_fit_too(name, method):
    with pytest.raises(ConfigError, match=rf"Mine\.{name} "):
        listed(**{name: method})


class Awaited(Callback):
    async def on_epoch_end(self, epoch, logs):
        raise AssertionError


class Yielding(Callback):
    def on_step_end(self, report):
        yield


@pytest.mark.parametrize("kind", [Awaited, Yielding])
def test_a_hook_whose_body_would_not_run_is_refused(kind):
    with pytest.raises(ConfigError, match=kind.__name__):
        CallbackList([kind()])
