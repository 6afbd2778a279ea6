"""The Triton kernel of linear_cross_entropy: losses, predictions and gradients of rows of logits.

Each program handles one row. It reads the row twice in blocks, the second time from the cache, and overwrites the
logits with their gradients. There are no sums across programs, so results do not depend on their order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["labels", "scales", "losses", "nlls", "predicted"])
def cross_entropy_rows(
    logits,
    bias,
    hidden,
    counted,
    labels,
    scales,
    losses,
    nlls,
    predicted,
    num_classes,
    stride,
    width,
    smoothing,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SMOOTHED: tl.constexpr,
    GRADIENTS: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Losses and prediction of one row of logits; with GRADIENTS the row becomes the gradients of its logits.

    A block is read in groups that one thread loads at once. Maximum and sum are kept per group, so that threads
    exchange nothing before the end of the row. Beyond the last class, logits must be -inf. With COPY, the hidden
    states of counted rows are copied to `counted`; those of other rows are 0 there.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    hidden += row * width
    counted += row * width
    scale = tl.load(scales + row)
    if scale == 0.0:
        tl.store(losses + row, 0.0)
        tl.store(nlls + row, 0.0)
        tl.store(predicted + row, -1)
        if GRADIENTS:
            _erase(logits, stride, BLOCK, GROUP)
        if COPY:
            _erase(counted, width, BLOCK, GROUP)
        return

    label = tl.load(labels + row)
    at_label = _read(logits, bias, label, num_classes, stride, softcap, HAS_BIAS, HAS_SOFTCAP, "")
    largest, total, plain, place = _scan(
        logits, bias, num_classes, stride, softcap, HAS_BIAS, HAS_SOFTCAP, SMOOTHED, BLOCK, GROUP
    )
    top = tl.max(largest, 0)
    sum_exp = tl.sum(total * tl.exp(largest - top), 0)
    nll = tl.log(sum_exp) + (top - at_label)
    tl.store(nlls + row, nll)
    if SMOOTHED:
        uniform = tl.log(sum_exp) + (top - tl.sum(plain, 0) / num_classes)
        nll += smoothing * (uniform - nll)
    tl.store(losses + row, nll)

    # The first of the groups with the largest value, and the first index in it.
    start = tl.min(tl.where(largest == top, place, stride), 0)
    within = tl.arange(0, GROUP)
    few = _read(logits, bias, start + within, num_classes, stride, softcap, HAS_BIAS, HAS_SOFTCAP, "")
    found = start + tl.min(tl.where(few == top, within, GROUP), 0) % GROUP  # all may be -inf: then it is the first
    if sum_exp != sum_exp:  # a value is NaN, or all are infinite
        found = tl.where(
            _any_nan(logits, bias, num_classes, stride, softcap, HAS_BIAS, HAS_SOFTCAP, BLOCK, GROUP), -1, found
        )
    tl.store(predicted + row, found)

    if GRADIENTS:
        tl.debug_barrier()  # all threads have read the elements that belong to others
        even = smoothing / num_classes * scale
        _write_gradients(
            logits, bias, num_classes, stride, softcap, top, scale / sum_exp, even,
            HAS_BIAS, HAS_SOFTCAP, BLOCK, GROUP,
        )  # fmt: skip
        grad = tl.exp(at_label - top) * (scale / sum_exp) - even - (1.0 - smoothing) * scale
        if HAS_SOFTCAP:
            grad *= 1.0 - (at_label / softcap) * (at_label / softcap)
        tl.debug_barrier()  # the label's own gradient is written after that of its block
        tl.store(logits + label, grad)
    if COPY:
        _copy(hidden, counted, width, BLOCK, GROUP)


@triton.jit
def _read(
    logits,
    bias,
    columns,
    num_classes,
    stride,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Return logits of a row in float32, with bias and softcap; -inf beyond the last class."""
    x = tl.load(logits + columns, mask=columns < stride, other=float("-inf"), eviction_policy=POLICY).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + columns, mask=columns < num_classes, other=0.0)
    if HAS_SOFTCAP:
        x = softcap * (2.0 / (1.0 + tl.exp(-2.0 / softcap * x)) - 1.0)  # tanh
        x = tl.where(columns < num_classes, x, float("-inf"))
    return x


@triton.jit
def _columns(BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Return the columns of a block as (groups, GROUP): those of a group belong to one thread."""
    return (tl.arange(0, BLOCK // GROUP) * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]


@triton.jit
def _scan(
    logits,
    bias,
    num_classes,
    stride,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return per group the largest logit, Σ exp(logit - largest), Σ logit and the first index of the largest."""
    columns = _columns(BLOCK, GROUP)
    groups = tl.arange(0, BLOCK // GROUP) * GROUP
    largest = tl.full((BLOCK // GROUP,), -3.0e38, tl.float32)  # finite, because differences of infinities are NaN
    total = tl.zeros((BLOCK // GROUP,), tl.float32)
    plain = tl.zeros((BLOCK // GROUP,), tl.float32)
    place = groups
    for first in range(0, stride, BLOCK):
        at = first + columns
        x = _read(logits, bias, at, num_classes, stride, softcap, HAS_BIAS, HAS_SOFTCAP, "evict_last")
        new = tl.max(x, 1)
        place = tl.where(new > largest, first + groups, place)
        new = tl.maximum(new, largest)
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new[:, None]), 1)
        largest = new
        if SMOOTHED:
            plain += tl.sum(tl.where(at < num_classes, x, 0.0), 1)
    return largest, total, plain, place


@triton.jit
def _any_nan(
    logits,
    bias,
    num_classes,
    stride,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Return whether a logit of the row is NaN."""
    columns = _columns(BLOCK, GROUP)
    found = tl.zeros((BLOCK // GROUP,), tl.int32)
    for first in range(0, stride, BLOCK):
        x = _read(logits, bias, first + columns, num_classes, stride, softcap, HAS_BIAS, HAS_SOFTCAP, "")
        found = tl.maximum(found, tl.max((x != x).to(tl.int32), 1))
    return tl.max(found, 0) > 0


@triton.jit
def _write_gradients(
    logits,
    bias,
    num_classes,
    stride,
    softcap,
    top,
    factor,
    even,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Overwrite the logits x of a row with exp(x - top) · factor - even, times the slope of the softcap."""
    columns = _columns(BLOCK, GROUP)
    num_blocks = tl.cdiv(stride, BLOCK)
    for step in range(num_blocks):
        at = (num_blocks - 1 - step) * BLOCK + columns  # blocks read last are most likely still cached
        x = _read(logits, bias, at, num_classes, stride, softcap, HAS_BIAS, HAS_SOFTCAP, "evict_first")
        grad = tl.exp(x - top) * factor - even
        if HAS_SOFTCAP:
            grad = tl.where(at < num_classes, grad * (1.0 - (x / softcap) * (x / softcap)), 0.0)
        tl.store(logits + at, grad, mask=at < stride)


@triton.jit
def _erase(values, size, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Fill a row with zeros."""
    columns = _columns(BLOCK, GROUP)
    for first in range(0, size, BLOCK):
        tl.store(values + first + columns, tl.zeros((BLOCK // GROUP, GROUP), tl.float32), mask=first + columns < size)


@triton.jit
def _copy(source, target, size, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Copy a row."""
    columns = _columns(BLOCK, GROUP)
    for first in range(0, size, BLOCK):
        at = first + columns
        tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)
