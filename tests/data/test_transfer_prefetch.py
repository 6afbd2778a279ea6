"""Prefetching: order, backpressure, errors in their place, and no thread left behind."""

import gc
import threading
from itertools import count

import pytest

from etude.data import prefetch_stream

TIMEOUT_S = 10


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "etude-prefetch"]


def assert_ends(threads):
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not any(thread.is_alive() for thread in threads)


class Counted:
    """An endless source that tells how many items were begun, and lets a test wait for a number of them."""

    def __init__(self):
        self.begun = 0
        self.changed = threading.Condition()

    def __iter__(self):
        for item in count():
            with self.changed:
                self.begun += 1
                self.changed.notify_all()
            yield item

    def wait_until(self, begun):
        with self.changed:
            assert self.changed.wait_for(lambda: self.begun >= begun, TIMEOUT_S)


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_items_come_complete_and_in_order(depth):
    assert list(prefetch_stream(range(100), depth)) == list(range(100))
    assert list(prefetch_stream([], depth)) == []


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_the_producer_is_at_most_depth_items_ahead(depth):
    source = Counted()
    with prefetch_stream(source, depth) as stream:
        source.wait_until(depth)  # it does run ahead before anything is asked for
        for taken in range(1, 50):
            assert next(stream) == taken - 1
            source.wait_until(taken + depth)
            assert source.begun <= taken + depth


def test_a_full_queue_blocks_the_producer():
    """The producer's next item is not begun until one is taken: seen at the moment when it begins."""
    taken = 0
    ahead = []

    def source():
        for item in range(200):
            ahead.append(item - taken)
            yield item

    for item in prefetch_stream(source(), 3):
        assert item == taken
        taken += 1
    # The consumer counts an item after taking it, so the producer may see it one late.
    assert len(ahead) == 200
    assert max(ahead) <= 3


def test_an_error_comes_after_the_items_before_it():
    def source():
        yield from (1, 2, 3)
        raise OSError("disk on fire")

    stream = prefetch_stream(source(), 2)
    assert [next(stream) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(OSError, match="disk on fire"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_an_error_on_beginning_is_raised_at_the_first_item():
    class Broken:
        def __iter__(self):
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        next(prefetch_stream(Broken()))


def test_closing_ends_a_blocked_producer_and_its_generator():
    finished = threading.Event()

    def source():
        try:
            yield from count()
        finally:
            finished.set()

    generator = source()  # kept, so that only the stream can have closed it
    stream = prefetch_stream(generator, 2)
    assert next(stream) == 0
    threads = [stream._thread]
    stream.close()
    assert finished.is_set()
    assert not any(thread.is_alive() for thread in threads)
    assert list(stream) == []
    stream.close()


def test_closing_discards_an_error_that_comes_too_late():
    go = threading.Event()

    def source():
        yield 1
        go.wait(TIMEOUT_S)
        raise OSError("late")

    stream = prefetch_stream(source(), 2)
    assert next(stream) == 1
    go.set()
    stream.close()
    with pytest.raises(StopIteration):
        next(stream)


def test_closing_wakes_a_waiting_consumer():
    go = threading.Event()

    def source():
        go.wait()
        yield 1

    stream = prefetch_stream(source(), 1)
    results = []
    consumer = threading.Thread(target=lambda: results.append(list(stream)), daemon=True)
    closer = threading.Thread(target=stream.close)
    consumer.start()
    closer.start()
    consumer.join(TIMEOUT_S)  # while the source still waits
    is_woken = not consumer.is_alive()
    go.set()
    closer.join(TIMEOUT_S)
    assert is_woken
    assert results == [[]]


def test_breaking_off_a_loop_leaves_no_thread():
    before = set(prefetch_threads())
    for item in prefetch_stream(count(), 2):
        threads = [thread for thread in prefetch_threads() if thread not in before]
        if item == 3:
            break
    gc.collect()
    assert len(threads) == 1
    assert_ends(threads)


def test_leaving_the_context_ends_the_thread():
    with prefetch_stream(count(), 2) as stream:
        thread = stream._thread
        assert next(stream) == 0
        assert thread.is_alive()
    assert not thread.is_alive()


@pytest.mark.parametrize("depth", [0, -1])
def test_depth_must_be_positive(depth):
    with pytest.raises(ValueError, match="at least 1"):
        prefetch_stream([], depth)
