# mypy: ignore-errors
"""Triton kernels of the expected-value loss: the work between its products, one pass per row.

Each program handles one row of logits (V,), entirely in registers. Everything is computed in float32. There are no
sums across programs, so results do not depend on their order.
"""

import triton
import triton.language as tl


@triton.jit
def _load_logits(logits, bias, softcap, cols, inside, BIAS: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return a row of logits, -inf beyond its end, and the derivative of the softcap."""
    found = tl.load(logits + cols, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        found += tl.load(bias + cols, mask=inside, other=0.0)
    derivative = found
    if SOFTCAP:
        ratio = 2.0 * tl.sigmoid(found * (2.0 / softcap)) - 1.0  # tanh
        found = ratio * softcap
        derivative = 1.0 - ratio * ratio
    return tl.where(inside, found, float("-inf")), derivative


@triton.jit
def _store_probs(probs, exps, total, cols, inside):
    """Store rounded probabilities and return the inverse of their sum, to normalise them again."""
    rounded = (exps * (1.0 / total)).to(probs.dtype.element_ty)
    tl.store(probs + cols, rounded, mask=inside)
    return 1.0 / tl.sum(rounded.to(tl.float32), 0)


@triton.jit
def _store_gradients(grads, found, derivative, weight, cols, inside, SOFTCAP: tl.constexpr):
    """Store gradients of logits times the weight of the row: exactly 0 if that is 0."""
    if SOFTCAP:
        found *= derivative
    found = tl.where(weight == 0.0, 0.0, found * weight)
    tl.store(grads + cols, found.to(grads.dtype.element_ty), mask=inside)


@triton.jit
def _penalty(errors, delta, KIND: tl.constexpr):
    """Return the penalty of every error and its derivative."""
    if KIND == "huber":
        size = tl.abs(errors)
        inner = tl.where(size > delta, delta, size)
        losses = inner * (size - 0.5 * inner)
        slopes = tl.where(errors < 0.0, -inner, inner)
    else:
        losses = errors * errors
        slopes = 2.0 * errors
    return losses, slopes


@triton.jit
def _bin_masses(edges, edge_rests, place, place_rest, scale, cols, inside, last):
    """Return the mass of a Gaussian in each bin; see `HLGauss.soft_targets`."""
    low = tl.load(edges + cols, mask=inside, other=0.0) - place
    low = tl.erf((low + tl.load(edge_rests + cols, mask=inside, other=0.0) - place_rest) * scale)
    high = tl.load(edges + cols + 1, mask=inside, other=0.0) - place
    high = tl.erf((high + tl.load(edge_rests + cols + 1, mask=inside, other=0.0) - place_rest) * scale)
    first = tl.erf((tl.load(edges) - place + tl.load(edge_rests) - place_rest) * scale)
    final = tl.erf((tl.load(edges + last) - place + tl.load(edge_rests + last) - place_rest) * scale)
    return tl.where(inside, (high - low) / (final - first), 0.0)


@triton.jit
def scalar_kernel(
    logits,  # (n, V)
    stride,
    grads,  # (n, V) in the memory of the logits: a row is overwritten after it was read
    grad_stride,
    bias,
    softcap,
    targets,
    row_weights,
    values,  # (V,)
    edges,
    edge_rests,
    place_rests,
    sigmas,
    losses,
    squares,
    num_codes,
    delta,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GRADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Everything for codes that represent one number each: softmax, expectation, loss, gradients of the logits."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < num_codes
    found, derivative = _load_logits(logits + row * stride, bias, softcap, cols, inside, BIAS, SOFTCAP)
    largest = tl.max(found, 0)
    exps = tl.exp(found - largest)
    total = tl.sum(exps, 0)
    weight = tl.load(row_weights + row)
    target = tl.where(weight == 0.0, 0, tl.load(targets + row))
    true = tl.load(values + target)
    gaps = tl.load(values + cols, mask=inside, other=0.0) - true
    error = tl.sum(exps * gaps, 0) / total
    tl.store(squares + row, error * error)
    probs = exps * (1.0 / total)
    if KIND == "wasserstein":
        gaps = tl.abs(gaps)
        loss = tl.sum(exps * gaps, 0) / total
        gradients = probs * (gaps - loss)
    elif KIND == "hl_gauss":
        scale = 0.7071067811865476 / tl.load(sigmas + target)
        rest = tl.load(place_rests + target)
        wanted = _bin_masses(edges, edge_rests, true, rest, scale, cols, inside, num_codes)
        log_total = largest + tl.log(total)
        loss = tl.sum(wanted * tl.where(inside, log_total - found, 0.0), 0)
        gradients = probs - wanted
    else:
        loss, slope = _penalty(error, delta, KIND)
        gradients = probs * (gaps - error) * slope
    tl.store(losses + row, loss)
    if GRADS:
        _store_gradients(grads + row * grad_stride, gradients, derivative, weight, cols, inside, SOFTCAP)


@triton.jit
def softmax_kernel(
    logits,  # (n, V)
    stride,
    probs,  # (n, V) in the memory of the logits: a row is overwritten after it was read
    prob_stride,
    bias,
    softcap,
    inverses,  # 1 / Σ of the rounded probabilities
    log_totals,  # log Σ exp of the logits
    num_codes,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn logits into probabilities in place."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < num_codes
    found, _ = _load_logits(logits + row * stride, bias, softcap, cols, inside, BIAS, SOFTCAP)
    largest = tl.max(found, 0)
    exps = tl.exp(found - largest)
    total = tl.sum(exps, 0)
    tl.store(inverses + row, _store_probs(probs + row * prob_stride, exps, total, cols, inside))
    tl.store(log_totals + row, largest + tl.log(total))


@triton.jit
def distance_kernel(
    logits,  # (n, V)
    stride,
    probs,  # (n, V) in the memory of the logits: a row is overwritten after it was read
    prob_stride,
    bias,
    softcap,
    targets,
    row_weights,
    products,  # (n, V) of the vectors with those of the targets
    product_stride,
    grads,  # (n, V) in the memory of the products, likewise
    grad_stride,
    norms,  # (V,) squared, of the vectors
    sigmas,
    losses,
    inverses,
    num_codes,
    size,  # of the vectors
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GRADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compare a distribution over vectors with their distances from the target; store probabilities and gradients."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < num_codes
    found, derivative = _load_logits(logits + row * stride, bias, softcap, cols, inside, BIAS, SOFTCAP)
    largest = tl.max(found, 0)
    exps = tl.exp(found - largest)
    total = tl.sum(exps, 0)
    tl.store(inverses + row, _store_probs(probs + row * prob_stride, exps, total, cols, inside))
    weight = tl.load(row_weights + row)
    target = tl.where(weight == 0.0, 0, tl.load(targets + row))
    squared = tl.load(norms + cols, mask=inside, other=0.0) + tl.load(norms + target)
    squared -= 2.0 * tl.load(products + row * product_stride + cols, mask=inside, other=0.0)
    squared = tl.where((cols == target) | (squared < 0.0), 0.0, squared) / size
    exps *= 1.0 / total
    if KIND == "wasserstein":
        gaps = tl.sqrt(squared)
        loss = tl.sum(exps * gaps, 0)
        gradients = exps * (gaps - loss)
    else:
        sigma = tl.load(sigmas + target)
        wanted = tl.where(inside, tl.exp(squared * (-0.5 / (sigma * sigma))), 0.0)
        wanted *= 1.0 / tl.sum(wanted, 0)
        log_total = largest + tl.log(total)
        loss = tl.sum(wanted * tl.where(inside, log_total - found, 0.0), 0)
        gradients = exps - wanted
    tl.store(losses + row, loss)
    if GRADS:
        _store_gradients(grads + row * grad_stride, gradients, derivative, weight, cols, inside, SOFTCAP)


@triton.jit
def penalty_kernel(
    expected,  # (n, parts · padded): sums of probabilities times the table
    expected_stride,
    table,  # (V, parts · padded): the vectors as one number of half precision, or as the sum of two
    inverses,
    targets,
    row_weights,
    losses,
    squares,
    slopes,  # (n, padded)
    slope_stride,
    shifts,  # (n,)
    size,
    padded,
    delta,
    KIND: tl.constexpr,  # "" computes only squared errors
    PARTS: tl.constexpr,
    GRADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compare expected vectors with the targets. With s the slopes of the penalty, the shift is s · E."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < padded
    weight = tl.load(row_weights + row)
    target = tl.where(weight == 0.0, 0, tl.load(targets + row)).to(tl.int64)
    inverse = tl.load(inverses + row)
    expected += row * expected_stride
    first = tl.load(expected + cols, mask=inside, other=0.0) * inverse
    errors = first - tl.load(table + target * padded * PARTS + cols, mask=inside, other=0.0).to(tl.float32)
    if PARTS == 2:
        errors += tl.load(expected + padded + cols, mask=inside, other=0.0) * inverse
        errors -= tl.load(table + target * padded * 2 + padded + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(squares + row, tl.sum(errors * errors, 0) / size)
    if KIND != "":
        penalties, found = _penalty(errors, delta, KIND)
        tl.store(losses + row, tl.sum(penalties, 0) / size)
        if GRADS:
            found = tl.where(weight == 0.0, 0.0, found * (weight / size)).to(slopes.dtype.element_ty)
            tl.store(slopes + row * slope_stride + cols, found, mask=inside)
            tl.store(shifts + row, tl.sum(found.to(tl.float32) * first, 0))


@triton.jit
def slope_kernel(
    probs,  # (n, V); overwritten by gradients of the logits
    stride,
    slopes,  # (n, padded)
    slope_stride,
    table,  # (V, ≥ padded)
    table_stride,
    inverses,
    shifts,
    log_totals,
    softcap,
    num_rows,
    num_codes,
    padded,
    SOFTCAP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_CODES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DOT: tl.constexpr,  # the dtype of the product's factors
):
    """Compute slopes @ table.T and, while a block of it is in registers, p · (s·c - s·E)."""
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    codes = tl.program_id(0) * BLOCK_CODES + tl.arange(0, BLOCK_CODES)
    places = tl.arange(0, BLOCK_SIZE)
    row_inside, code_inside = rows < num_rows, codes < num_codes
    inside = row_inside[:, None] & code_inside[None, :]
    block = probs + rows.to(tl.int64)[:, None] * stride + codes[None, :]
    lefts = slopes + rows.to(tl.int64)[:, None] * slope_stride + places[None, :]
    rights = table + codes[None, :] * table_stride + places[:, None]
    sums = tl.zeros((BLOCK_ROWS, BLOCK_CODES), tl.float32)
    for start in range(0, padded, BLOCK_SIZE):
        here = places < padded - start
        left = tl.load(lefts + start, mask=row_inside[:, None] & here[None, :], other=0.0)
        right = tl.load(rights + start, mask=code_inside[None, :] & here[:, None], other=0.0)
        sums = tl.dot(left.to(DOT), right.to(DOT), sums)
    wide = tl.load(block, mask=inside, other=0.0).to(tl.float32)  # loaded here, not earlier, to save registers
    sums -= tl.load(shifts + rows, mask=row_inside, other=0.0)[:, None]
    sums *= wide * tl.load(inverses + rows, mask=row_inside, other=0.0)[:, None]
    if SOFTCAP:
        # The logit is the logarithm of the probability, up to the row's total. Where that is 0, so is the gradient.
        logits = tl.log(tl.where(wide > 0.0, wide, 1.0))
        logits += tl.load(log_totals + rows, mask=row_inside, other=0.0)[:, None]
        ratio = logits / softcap
        sums *= 1.0 - ratio * ratio
    tl.store(block, sums.to(probs.dtype.element_ty), mask=inside)
