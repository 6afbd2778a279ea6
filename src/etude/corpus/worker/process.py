"""A worker process: answers tasks, one JSON object a line on stdin, each with one line, until there are no more."""

import contextlib
import json
import os
import sys
import traceback
from typing import Any

from etude.core.errors import DataError
from etude.corpus.worker.encoding import encode
from etude.corpus.worker.scanning import scan
from etude.corpus.worker.training import train


def answer(task: dict[str, Any]) -> dict[str, Any]:
    """Do a task; a mistake of the user comes back as words, one of ours as a traceback."""
    try:
        return {"done": {"scan": scan, "train": train, "encode": encode}[task["do"]](task)}
    except DataError as error:
        return {"error": str(error)}
    except OSError as error:
        what = f"{error.filename or task['result']} cannot be written ({error.strerror or error})"
        return {"unfinished": f"{what}; fix this and run the command again, which goes on where it stopped"}
    except MemoryError:
        return {"unfinished": "not enough memory; use fewer --workers, or cut long documents with --cut-chars"}
    except BaseException:
        return {"crash": traceback.format_exc()}


def serve() -> None:
    """Answer tasks until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    for line in sys.stdin:
        reply = json.dumps(answer(json.loads(line)))
        with contextlib.suppress(BrokenPipeError):
            print(reply, file=answers, flush=True)
