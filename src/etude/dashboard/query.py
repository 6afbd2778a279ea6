"""What requests ask for: parameters and bodies, checked."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from etude.dashboard.series import AXES
from etude.monitor.jsonl import decode

MOST_PIXELS = 8192
MOST_BODY_BYTES = 1 << 16


async def body(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request; raises HTTPException."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise HTTPException(413, "the request is too long")
    try:
        found = decode(body)
    except RecursionError:
        found = None
    if found is None:
        raise HTTPException(400, "the request holds no JSON object")
    return found


def names(request: Request) -> list[str]:
    """Return the metrics that a request names, at least one."""
    names = list(dict.fromkeys(request.query_params.getlist("name")))
    if not names:
        raise HTTPException(400, "name a metric, as in ?name=loss")
    return names


def axis(request: Request) -> str:
    """Return the axis of a chart."""
    axis = request.query_params.get("x", "step")
    if axis not in AXES:
        raise HTTPException(400, f"x is one of {', '.join(AXES)}, not {axis!r}")
    return str(axis)


def pixels(request: Request) -> int:
    """Return the width of a chart."""
    return int(min(max(number(request.query_params.get("pixels"), "pixels") or 800, 1), MOST_PIXELS))


def step(request: Request) -> int | None:
    """Return a step; None if the request has none."""
    step = number(request.query_params.get("step"), "step")
    if step is not None and not abs(step) < 1 << 62:
        raise HTTPException(400, "step is too large")
    return None if step is None else int(step)


def number(text: str | None, name: str) -> float | None:
    """Return a number of a request; None if it is not given."""
    if text is None or text == "":
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value:
        raise HTTPException(400, f"{name} is a number, not {text!r}")
    return value
