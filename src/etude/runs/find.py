"""Find the run that a word on the command line means: a path, a name, the beginning of one, or `latest`."""

from pathlib import Path

from etude.core.errors import RunFolderError
from etude.core.spelling import did_you_mean, listed, shorten
from etude.monitor.reading import CONFIG, find_runs

LATEST = "latest"


def find_run(word: str, root: str | Path = "runs") -> Path:
    """Return the folder of the run that `word` means.

    It is the path of a run, or the path below `root` or the folder name of one, or the beginning of either if only one
    run begins so. `latest`, also after a folder as in `lenet5/latest`, is the run that was started last.
    Raises RunFolderError if there is none, or more than one.
    """
    if word and (Path(word) / CONFIG).is_file():
        return Path(word)
    if Path(word).name == LATEST:
        return _latest(word, root)
    runs = list(find_runs(root))
    names = {path: path.relative_to(root).as_posix() for path in runs}
    given = word.rstrip("/")
    for matches in (_is_name, _begins):
        if found := [path for path in runs if given and matches(given, names[path])]:
            break
    else:
        found = list(find_runs(word)) if given and Path(word).is_dir() else []
    if len(found) == 1:
        return found[0]
    if found:
        some = listed((str(path) for path in found[:4]), shorten=False)
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise RunFolderError(
            f"'{shorten(word)}' may be one of {len(found)} runs: {some}{more}; write more of its name"
        )
    close = did_you_mean(given, {*names.values(), *(path.name for path in runs)})
    hint = close or "; `etude runs list` lists the runs, --dir chooses another folder"
    raise RunFolderError(f"there is no run '{shorten(word)}' in {root}{hint}")


def _is_name(word: str, name: str) -> bool:
    return word in (name, name.rpartition("/")[2])


def _begins(word: str, name: str) -> bool:
    return name.startswith(word) or name.rpartition("/")[2].startswith(word)


def _latest(word: str, root: str | Path) -> Path:
    inside = Path(word).parent
    folder = inside if inside != Path() and inside.is_dir() else Path(root, inside)
    found = list(find_runs(folder))
    if not found:
        raise RunFolderError(f"there are no runs in {folder}; choose another folder with --dir")
    return max(found, key=lambda path: ((path / CONFIG).stat().st_mtime, path))
