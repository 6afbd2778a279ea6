"""A program that makes a corpus again and again, killed each time at another point, until it is done.

Arguments: the folder of texts, the folder for the corpus, and which points to kill at (every N-th). Each attempt is a
process of its own that kills itself with SIGKILL at the N-th call for progress.
"""

import os
import signal
import sys

from corpus_texts import SMALL

from etude.corpus import index, prepare_corpus

index.PART_BYTES = (1 << 10, 1 << 10)  # so that there is something to go on with


def attempt(folder: str, out: str, kill_at: int) -> None:
    calls = 0

    def progress(step: str, done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    prepare_corpus([folder], out, progress=progress, **SMALL)


def main() -> None:
    folder, out, stride = sys.argv[1], sys.argv[2], int(sys.argv[3])
    kills = 0
    while True:
        process = os.fork()
        if process == 0:
            code = 1
            try:
                attempt(folder, out, kill_at=1 + stride + kills)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(process, 0)
        if not os.WIFSIGNALED(status):
            break
        kills += 1
    print(kills)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
