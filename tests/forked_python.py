"""Python programs as forks of a process that has torch: what `python -c CODE` does, without two seconds of imports.

Not for tests of what happens before torch is imported, of the number of its threads or of the end of the interpreter.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Mapping
from pathlib import Path

_server: "subprocess.Popen[str] | None" = None


def run_python(
    *arguments: object, cwd: Path | str = ".", env: Mapping[str, str] | None = None, timeout: int = 240
) -> "subprocess.CompletedProcess[str]":
    """Run `python ARGUMENTS`: a script, `-m MODULE` or `-c CODE`, and arguments for it."""
    words = [str(one) for one in arguments]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {"words": words, "cwd": str(Path(cwd).resolve()), "env": dict(os.environ if env is None else env)}
        code = _ask({**request, "out": str(out), "err": str(err), "timeout": timeout})
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def _ask(request: dict[str, object]) -> int:
    global _server
    if _server is None:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        _server = subprocess.Popen([sys.executable, __file__], env=env, start_new_session=True, **pipes)
        atexit.register(_stop)
    assert _server.stdin is not None
    assert _server.stdout is not None
    _server.stdin.write(json.dumps(request) + "\n")
    _server.stdin.flush()
    return int(_server.stdout.readline())


def _stop() -> None:
    assert _server is not None
    _server.kill()  # the end of its input may not reach it: other processes hold copies of the pipe
    _server.communicate()


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    del sys.path[0]
    gc.freeze()  # a collection in a fork would copy all pages
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.alarm(request["timeout"])
            os._exit(_child(request))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _child(request: dict[str, object]) -> int:
    """Become the program and return its exit code."""
    files = ((os.devnull, os.O_RDONLY), *((str(request[name]), os.O_WRONLY | os.O_CREAT) for name in ("out", "err")))
    for descriptor, (path, flags) in enumerate(files):
        os.dup2(os.open(path, flags, 0o644), descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(str(request["cwd"]))
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    code = 0
    try:
        _execute(list(request["words"]))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def _execute(words: list[str]) -> None:
    sys.path[:0] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    if words[0] == "-W":
        warnings.simplefilter(words[1])
        del words[:2]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if words[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *words[2:]], [""]
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif words[0] == "-m":
        sys.argv, sys.path[:0] = words[1:], [str(Path.cwd())]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = words, [str(Path(words[0]).parent)]
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
