"""Tests of etude.core.spans."""

import pytest

from etude.core.spans import span


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), GeneratorExit()])
def test_a_part_that_nobody_watches_hides_no_error(error):
    with pytest.raises(type(error)) as caught, span("forward"):
        raise error
    assert caught.value is error
